"""Runs whose engines are processes of their own: engines are killed, and the trainer is. Nobody is left behind."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.integration.test_kill_and_resume import wait_for_step
from tests.integration.tiny import metrics, start, train, write_recipe

KILLED_IN_SYNC = str(Path(__file__).with_name("killed_in_sync.py"))
PROCESS = "rollout.placement=process"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("engines"), run={"steps": 12}, checkpoint={"every": 0})


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> bytes:
    """The weights at the end of a run with its engine in itself."""
    out = tmp_path_factory.mktemp("undisturbed")
    status, output = train(recipe, f"run.output_dir={out}")
    assert status == 0, output[-3000:]
    return (out / "export/model.safetensors").read_bytes()


def engines() -> dict[int, int]:
    """pid -> parent's pid of every engine process on this machine."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and b"megatron_rft.rollout.host" in (folder / "cmdline").read_bytes():
                found[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    return found


def of(parent: int) -> list[int]:
    return [pid for pid, its_parent in engines().items() if its_parent == parent]


def gone(pids: list[int], within_s: float = 10) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and set(pids) & engines().keys():
        time.sleep(0.1)
    return not set(pids) & engines().keys()


def test_a_killed_engine_is_replaced_and_the_run_is_the_same(recipe, undisturbed, tmp_path):
    """At staleness 0 the actor's weights are those that the lost engine had, and seeds are the requests' own."""
    out = tmp_path / "process"
    process = start(recipe, f"run.output_dir={out}", PROCESS, "rollout.processes=2")
    wait_for_step(out, process, 2)
    pids = of(process.pid)
    assert len(pids) == 2, engines()
    os.kill(pids[0], signal.SIGKILL)
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output[-3000:]
    assert "was killed by SIGKILL; it was started again with the actor's weights" in output
    assert metrics(out)[-1]["faults/engine_restarts"] == 1
    assert (out / "engines/engine_1.log").exists()
    assert gone(pids) and not of(process.pid)
    assert (out / "export/model.safetensors").read_bytes() == undisturbed


def test_killed_in_syncs(recipe, undisturbed, tmp_path):
    """In the first one, of which every weight is compared, and in another; no engine is left over."""
    out, before = tmp_path / "run", engines().keys()
    arguments = recipe, f"run.output_dir={out}", PROCESS
    status, output = train(*arguments, program=(KILLED_IN_SYNC,), KILL_IN_SYNCS="0 5")
    assert status == 0, output[-3000:]
    assert output.count("was killed by SIGKILL; it was started again with the actor's weights") == 2
    assert metrics(out)[-1]["faults/engine_restarts"] == 2
    assert not engines().keys() - before
    assert (out / "export/model.safetensors").read_bytes() == undisturbed


def test_no_engine_outlives_a_killed_trainer(recipe, tmp_path):
    out = tmp_path / "run"
    process = start(recipe, f"run.output_dir={out}", PROCESS, "run.steps=1000")
    wait_for_step(out, process, 1)
    pids = of(process.pid)
    assert len(pids) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert gone(pids)


def test_an_engine_process_that_cannot_start_ends_the_run_with_its_log(recipe, tmp_path):
    status, output = train(recipe, f"run.output_dir={tmp_path / 'run'}", PROCESS, "faults.engine_start_s=0.01")
    assert status == 3
    assert "engine process 0 is silent for 0.01 s. It was starting; its log ends" in output


def test_new_weights_in_the_middle_of_generation(recipe, tmp_path):
    """Three batches under way: no response is older than that, and the run can be stopped and gone on with."""
    out, ahead = tmp_path / "run", ["rollout.staleness=3", "algorithm.importance=truncated"]
    process = start(recipe, f"run.output_dir={out}", PROCESS, *ahead)
    wait_for_step(out, process, 4)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 75, output[-3000:]
    status, output = train(recipe, f"run.output_dir={out}", PROCESS, *ahead)
    assert status == 0 and "resumed after step" in output, output[-3000:]
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(13))
    stale = [line["rollout/staleness"] for line in lines[1:]]
    assert stale[0] == 0 and max(stale) in (1, 2, 3), stale
