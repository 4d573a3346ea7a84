"""The metrics file has every step once, however the run was killed."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rft.tracking.metrics import StepFile, read_metrics


def write_steps(path: Path, first: int, last: int) -> None:
    file = StepFile(path, first)
    for step in range(first, last):
        file.write(step, {"reward/mean": step / 10})
    file.close()


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_metrics(path)]


def test_one_line_per_step(tmp_path):
    path = tmp_path / "new folder" / "metrics.jsonl"
    write_steps(path, 0, 3)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["step"], record["reward/mean"]) for record in records] == [(0, 0.0), (1, 0.1), (2, 0.2)]
    assert all(record["time"] > 1.6e9 for record in records)


def test_a_step_cannot_be_written_twice(tmp_path):
    write_steps(tmp_path / "m.jsonl", 0, 3)
    file = StepFile(tmp_path / "m.jsonl", 3)
    with pytest.raises(AssertionError, match="step 2 is already written"):
        file.write(2, {})


def test_not_finite_is_null_and_the_line_is_valid_json(tmp_path):
    file = StepFile(tmp_path / "m.jsonl")
    file.write(1, {"nan": math.nan, "inf": math.inf, "half": 0.5, "many": 2**40})
    (line,) = (tmp_path / "m.jsonl").read_text().splitlines()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(line, parse_constant=refuse)
    assert (record["nan"], record["inf"], record["half"], record["many"]) == (None, None, 0.5, 2**40)


def test_a_new_run_begins_the_file_anew(tmp_path):
    write_steps(tmp_path / "m.jsonl", 0, 5)
    StepFile(tmp_path / "m.jsonl", 0)
    assert steps_of(tmp_path / "m.jsonl") == []


@settings(max_examples=60)
@given(done=st.integers(0, 8), resume=st.integers(0, 8), torn=st.integers(0, 60))
def test_killed_and_resumed_has_every_step_once(tmp_path_factory, done, resume, torn):
    """Killed after `done` whole lines and `torn` bytes of the next, resumed at `resume` <= done, run to step 10."""
    resume = min(resume, done)
    path = tmp_path_factory.mktemp("run") / "m.jsonl"
    write_steps(path, 0, done + 1)
    whole = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole[:done]) + whole[done][: min(torn, len(whole[done]) - 1)])
    write_steps(path, resume, 10)
    assert steps_of(path) == list(range(10))
    assert path.read_bytes().count(b"\n") == 10
    assert path.read_bytes().splitlines(keepends=True)[:resume] == whole[:resume]


def test_damage_before_the_resumed_step_does_not_take_good_lines_along(tmp_path):
    path = tmp_path / "m.jsonl"
    write_steps(path, 0, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\0\0\0\n" + b"[1]\n" + lines[1] + lines[1] + lines[2] + lines[3])
    StepFile(path, 3)
    assert path.read_bytes() == lines[0] + lines[1] + lines[2]


def test_kill_9_loses_no_step_that_was_logged(tmp_path):
    path = tmp_path / "m.jsonl"
    script = (
        "import sys, itertools\n"
        "from megatron_rft.tracking.metrics import StepFile\n"
        "file = StepFile(sys.argv[1])\n"
        "for step in itertools.count():\n"
        "    file.write(step, {'reward/mean': 0.5})\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    logged = [int(process.stdout.readline()) for _ in range(50)]
    os.kill(process.pid, signal.SIGKILL)
    logged += [int(line) for line in process.stdout]
    process.wait()
    assert set(logged) <= set(steps_of(path))
    write_steps(path, 40, 45)
    assert steps_of(path) == list(range(45))


def test_a_line_without_its_end_is_torn_even_if_it_reads_well(tmp_path):
    """Appending to it would join two steps into one broken line."""
    path = tmp_path / "m.jsonl"
    write_steps(path, 0, 3)
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert steps_of(path) == [0, 1]
    write_steps(path, 3, 5)
    assert steps_of(path) == [0, 1, 3, 4]
