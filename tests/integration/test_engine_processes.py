"""Runs with engines in separate processes: engines are killed, and the trainer is; no process is left."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.integration.engine_process import is_engine
from tests.integration.test_kill_and_resume import disturbed, terminate, wait_for_step
from tests.integration.tiny import metrics, start, train, wait_until, write_recipe

KILLED_IN_SYNC = str(Path(__file__).with_name("killed_in_sync.py"))
PROCESS = "rollout.placement=process"
SILENT = """
import sys
from megatron_rft.commands import main
from megatron_rft.inference import process

start = process.start_helper
process.start_helper = lambda command, **options: start(["sleep", "600"], **options)
sys.exit(main.main())
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("engines"), run={"steps": 12}, checkpoint={"every": 0})


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> bytes:
    """The final weights of a run with a colocated engine."""
    out = tmp_path_factory.mktemp("undisturbed")
    status, output = train(recipe, f"run.output_dir={out}")
    assert status == 0, output[-3000:]
    return (out / "export/model.safetensors").read_bytes()


def engines_of(run: Path) -> list[int]:
    """The engine processes whose log is in a run's folder, also after the end of the trainer."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            pid = int(folder.name) if folder.name.isdigit() else 0
            if pid and is_engine(pid) and (folder / "fd/1").readlink().is_relative_to(run):
                found.append(pid)
    return found


def gone(run: Path) -> bool:
    return wait_until(lambda: not engines_of(run))


def test_a_killed_engine_is_replaced_and_the_run_is_the_same(recipe, undisturbed, tmp_path):
    """With staleness 0 the actor has the weights of the lost engine, and seeds belong to requests."""
    out = tmp_path / "process"

    def kill_an_engine(process: subprocess.Popen) -> None:
        pids = engines_of(out)
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)

    status, output = disturbed(kill_an_engine, recipe, out, PROCESS, "rollout.processes=2", step=2, left=2)
    assert status == 0, output[-3000:]
    assert "was killed by SIGKILL; it was started again with the actor's weights" in output
    assert metrics(out)[-1]["faults/engine_restarts"] == 1
    assert (out / "engines/engine_1.log").exists()
    assert gone(out)
    assert (out / "export/model.safetensors").read_bytes() == undisturbed


def test_killed_in_syncs(recipe, undisturbed, tmp_path):
    """Kills engines in the first sync, which compares every weight, and in a later one. No engine is left over."""
    out = tmp_path / "run"
    process = start(recipe, f"run.output_dir={out}", PROCESS, program=(KILLED_IN_SYNC,), KILL_IN_SYNCS="0 5")
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output[-3000:]
    assert output.count("was killed by SIGKILL; it was started again with the actor's weights") == 2
    assert metrics(out)[-1]["faults/engine_restarts"] == 2
    assert gone(out)
    assert (out / "export/model.safetensors").read_bytes() == undisturbed


def test_no_engine_outlives_a_killed_trainer(recipe, tmp_path):
    out = tmp_path / "run"
    process = start(recipe, f"run.output_dir={out}", PROCESS, "run.steps=1000")
    wait_for_step(out, process, 1)
    assert len(engines_of(out)) == 1
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=600)
    assert gone(out)


def test_an_engine_process_that_cannot_start_ends_the_run_with_its_log(recipe, tmp_path):
    """In its place there is a process that never answers: a real one may be quicker than a busy machine counts."""
    out, limit = f"run.output_dir={tmp_path / 'run'}", "faults.engine_start_s=0.01"
    status, output = train(recipe, out, PROCESS, limit, program=("-c", SILENT))
    assert status == 3 and "engine process 0 is silent for 0.01 s. It was starting; its log ends" in output, output


def test_new_weights_in_the_middle_of_generation(recipe, tmp_path):
    """With three pending batches no response is older than three versions, and the run can be stopped and resumed."""
    out, ahead = tmp_path / "run", ["rollout.staleness=3", "algorithm.importance=truncated"]
    status, output = disturbed(terminate, recipe, out, PROCESS, *ahead, step=4, left=2)
    assert status == 75, output[-3000:]
    status, output = train(recipe, f"run.output_dir={out}", PROCESS, *ahead)
    assert status == 0 and "resumed after step" in output, output[-3000:]
    lines = metrics(out)
    assert [line["step"] for line in lines] == list(range(13))
    stale = [line["rollout/staleness"] for line in lines[1:]]
    assert stale[0] == 0 and max(stale) in (1, 2, 3), stale
