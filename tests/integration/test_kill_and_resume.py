"""Killed at any moment, a run goes on as if nothing had been: the same weights bit for bit, each step logged once.

MEGATRON_RFT_KILLS says how many times the run is killed (default 3).
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.integration.tiny import metrics, start, train, write_recipe

KILLS = int(os.environ.get("MEGATRON_RFT_KILLS", "3"))
TIMED = ("seconds/", "memory/", "per_second", "rollout/", "sync/seconds", "time")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(folder with the recipe, its run's folder) of a run that nobody stopped, with PIPO at work."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = write_recipe(folder, pipo={"window": 2, "learning_rate": 1e-2}, algorithm={"old_logprobs": "recompute"})
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    assert [line["step"] for line in metrics(folder / "run")] == list(range(7))
    return folder, folder / "run"


def numbers(run) -> list[dict]:
    """What the log says, without what depends on the clock."""
    return [{k: v for k, v in line.items() if not any(t in k for t in TIMED)} for line in metrics(run)]


def assert_same_run(run, other):
    assert (run / "export/model.safetensors").read_bytes() == (other / "export/model.safetensors").read_bytes()
    assert numbers(run) == numbers(other)


def test_pipo_made_steps_of_both_kinds_or_this_proves_little(undisturbed):
    lines = metrics(undisturbed[1])
    assert any("verification/grad_norm" in line for line in lines)


def test_kill_9_at_random_moments(undisturbed, tmp_path):
    folder, expected = undisturbed
    out, rng = tmp_path / "run", random.Random(7)
    arguments = [f"run.output_dir={out}"]
    log = out / "metrics.jsonl"
    for _ in range(KILLS):
        process = start(folder / "recipe.yaml", *arguments)
        before = log.stat().st_size if log.exists() else 0
        while process.poll() is None and (log.stat().st_size if log.exists() else 0) == before:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 2.0))  # anywhere in the steps and the checkpoints that are being written
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    status, output = train(folder / "recipe.yaml", *arguments)
    assert status == 0, output[-3000:]
    assert_same_run(out, expected)


def test_sigterm_saves_and_says_so(undisturbed, tmp_path):
    folder, expected = undisturbed
    out = tmp_path / "run"
    process = start(folder / "recipe.yaml", f"run.output_dir={out}", "checkpoint.every=0")
    for line in process.stdout:
        if "step 2/6" in line:
            process.send_signal(signal.SIGTERM)
            break
    output = process.stdout.read()
    assert process.wait(timeout=60) == 75, output
    assert "stopped by SIGTERM" in output
    assert list((out / "checkpoints").glob("step_*"))
    status, output = train(folder / "recipe.yaml", f"run.output_dir={out}", "checkpoint.every=0")
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert_same_run(out, expected)


def test_killed_rank_is_named_and_two_ranks_resume_as_one(undisturbed, tmp_path):
    """Rank 1 of two is killed; the launcher says which, and the run goes on in another layout."""
    folder, expected = undisturbed
    out = tmp_path / "run"
    process = start(folder / "recipe.yaml", f"run.output_dir={out}", "--nproc", "2")
    for line in process.stdout:
        if "step 3/6" in line:
            break
    killed = time.monotonic()
    os.kill(rank_pid(process.pid, 1), signal.SIGKILL)
    output = process.stdout.read()
    assert process.wait(timeout=60) == 3, output
    assert time.monotonic() - killed < 60
    assert "rank 1 was killed by signal 9" in output
    status, output = train(folder / "recipe.yaml", f"run.output_dir={out}")
    assert status == 0 and "resumed after step 2" in output, output[-3000:]
    rewards, wanted = ([line.get("reward/mean") for line in metrics(run)] for run in (out, expected))
    assert rewards == wanted


def rank_pid(launcher: int, rank: int) -> int:
    """The child of the launcher whose environment says that rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")
