"""`megatron-rft status`: what stands in a run's files."""

import json
import os
import time

import pytest

from megatron_rft.commands.main import main
from megatron_rft.tracking.metrics import NOTES_FILE, add_note
from megatron_rft.utils import run_lock
from tests.unit.report.made import write_run


@pytest.fixture
def run(tmp_path):
    folder = write_run(tmp_path / "mine", pipo=True, steps=10)
    for step in (4, 8):
        (folder / f"checkpoints/step_{step:06d}").mkdir(parents=True)
        (folder / f"checkpoints/step_{step:06d}/run.json").write_text("{}")
    add_note(folder / NOTES_FILE, "step 7: the entropy has collapsed")
    return folder


def node(run, index, age=0.0, still_s=2.0):
    rank = {"rank": index, "step": 11, "phase": "training", "still_s": still_s}
    content = {"time": time.time() - age, "host": f"n{index}", "still": False, "ranks": [rank]}
    (run / "launch").mkdir(exist_ok=True)
    (run / f"launch/node_{index}.json").write_text(json.dumps(content))


def test_what_it_says(run, capsys):
    node(run, 0), node(run, 1, still_s=77.0), node(run, 2, age=600.0)
    with run_lock.held(run):
        assert main(["status", str(run)]) == 0
    told = capsys.readouterr().out
    assert f"process {os.getpid()} on " in told
    assert "mine: step 10 of 30" in told and "s per step" in told and "left" in told
    assert "reward 0.500" in told and "last evaluation, step 10: pass@1 0.400 ± 0.020" in told
    assert "  rank 0: step 11, training\n" in told and "rank 1: step 11, training, has not moved for 77 s" in told
    assert "node n2: nothing heard for 10:" in told
    assert "checkpoints: step_000004 (" in told and "step_000008 (" in told
    assert "the entropy has collapsed" in told


def test_the_time_left_does_not_count_the_hours_before_a_resume(run, capsys):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"time": line["time"] - 36000 * (line["step"] < 5)} for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with run_lock.held(run):
        assert main(["status", str(run)]) == 0
    assert "2.0 s per step, 0:40 left" in capsys.readouterr().out


def test_a_run_has_finished_once_its_last_model_is_exported(run, capsys):
    """Also before its last step (early stopping), but not with the export of an earlier start."""
    node(run, 0, age=600.0)
    (run / "export").mkdir()
    assert main(["status", str(run)]) == 0
    told = capsys.readouterr().out
    assert "ago, finished\n" in told and "nothing heard" not in told and "left" not in told
    os.utime(run / "export", (1e9, 1e9))
    assert main(["status", str(run)]) == 0
    told = capsys.readouterr().out
    assert "finished" not in told and "no process: nothing runs here. The same command resumes" in told


def test_a_run_whose_process_was_killed_has_no_time_left(run, capsys):
    with run_lock.held(run):
        content = run_lock.lock_file(run).read_text()
    run_lock.lock_file(run).write_text(content.replace(run_lock.this_process().started, "12"))
    node(run, 0)  # its launcher wrote this just before
    assert main(["status", str(run)]) == 0
    told = capsys.readouterr().out
    assert f"no process: process {os.getpid()} on " in told and "ended without saying why" in told
    assert "left" not in told and "rank 0" not in told


def test_no_run_and_no_step(tmp_path, capsys):
    assert main(["status", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    (tmp_path / "recipe.yaml").write_text("run: {steps: 3}")  # of a user, beside his data
    assert main(["status", str(tmp_path)]) == 2
    (tmp_path / "launch").mkdir()
    assert main(["status", str(tmp_path)]) == 0
    assert "no step has finished yet" in capsys.readouterr().out
