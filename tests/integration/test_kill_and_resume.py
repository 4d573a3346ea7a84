"""A run that is killed at any moment resumes exactly: the same weights bit for bit, and each step logged once.

MEGATRON_RFT_KILLS says how many times the run is killed (default 3).
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_rft.launching.hangs import descendants
from megatron_rft.tracking.metrics import SAMPLES_FILE
from megatron_rft.utils.checkpoint_files import damage, latest
from megatron_rft.utils.files import read_json_lines
from megatron_rft.utils.processes import STOP_SIGNALS
from tests.integration.tiny import freeze, kill, make_mixture, metrics, start, thaw, train, wait_until, write_recipe

KILLED_IN_SAVE = str(Path(__file__).with_name("killed_in_save.py"))
ONE_INTERRUPT = str(Path(__file__).with_name("one_interrupt.py"))
KILLS = int(os.environ.get("MEGATRON_RFT_KILLS", "3"))
TIMED = ("seconds/", "wait_seconds", "ranks/", "memory/", "per_second", "rollout/", "sync/seconds", "time", "mfu")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """(folder with the recipe, the run's folder) of an uninterrupted run with PIPO."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = write_recipe(
        folder,
        pipo={"window": 2, "learning_rate": 1e-2},
        algorithm={"old_logprobs": "recompute"},
        optimizer={"lr": 2e-2, "lr_decay_style": "linear", "lr_warmup_steps": 2, "lr_decay_steps": 12},
    )
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    assert [line["step"] for line in metrics(folder / "run")] == list(range(7))
    return folder, folder / "run"


def numbers(run) -> list[dict]:
    """The log's metrics without those that depend on the clock."""
    return [{k: v for k, v in line.items() if not any(t in k for t in TIMED)} for line in metrics(run)]


def assert_same_run(run, other):
    assert_same_weights(run, other)
    assert numbers(run) == numbers(other)
    assert samples(run) == samples(other)


def samples(run) -> list[tuple]:
    """The samples of each step, without duplicates."""
    return [(line["step"], line["samples"]) for line in read_json_lines(run / SAMPLES_FILE)]


def test_the_run_has_verification_steps_of_both_signs(undisturbed):
    lines = metrics(undisturbed[1])
    assert any("verification/grad_norm" in line for line in lines)
    assert [step for step, found in samples(undisturbed[1]) if found] == list(range(1, 7))


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["forked", "new"])
def test_kill_9_at_random_moments(undisturbed, tmp_path, forked):
    """Kills in a different step each time, shortly after its line is logged, so also while a checkpoint is written.
    Every start is a fork, or a new interpreter."""
    folder, expected = undisturbed
    out, rng = tmp_path / "run", random.Random(7)
    first, *_, last = (line["time"] for line in metrics(expected))
    resumed = 0
    for number in range(KILLS):
        process = start(folder / "recipe.yaml", f"run.output_dir={out}", forked=forked)
        wait_for_step(out, process, step=1 + 4 * number // max(KILLS - 1, 1))
        time.sleep(rng.uniform(0, (last - first) / 3))  # two steps
        kill(process)
        resumed += "resumed after step" in process.communicate()[0]
    status, output = train(folder / "recipe.yaml", f"run.output_dir={out}", forked=forked)
    assert status == 0, output[-3000:]
    assert resumed + ("resumed after step" in output) >= 1, "no start found a checkpoint: this shows nothing"
    assert_same_run(out, expected)


def wait_for_step(run: Path, process: subprocess.Popen, step: int) -> None:
    """Wait until this start of the run has logged `step` (or a later one that it began with), or has ended."""
    log, begun = run / "metrics.jsonl", time.time()

    def logged() -> bool:
        if not log.exists() or log.stat().st_mtime <= begun:
            return False
        lines = metrics(run)
        return bool(lines) and lines[-1]["step"] >= step

    wait_until(logged, process)


def disturbed(
    disturb: Callable[[subprocess.Popen], None],
    recipe: Path,
    out: Path,
    *arguments: str,
    step: int,
    left: int = 0,
    checkpoint: bool = False,
    delay: float = 0.0,
    begin: Callable[..., subprocess.Popen] = start,
) -> tuple[int, str]:
    """Status and output of a run that `disturb` disturbs `delay` seconds after it has logged `step` and has a
    `checkpoint`. The run is stopped meanwhile, so that at least `left` steps remain. If it is too far, it is started
    again (by `begin`) and disturbed without delay."""
    for attempt in range(5):
        process = begin(recipe, f"run.output_dir={out}", *arguments)
        wait_for_step(out, process, step)
        if checkpoint:
            wait_until(lambda: bool(list(out.glob("checkpoints/step_??????/run.json"))), process)
        time.sleep(0 if attempt else delay)
        assert not process.poll(), process.communicate()[0][-3000:]
        steps = yaml.safe_load((out / "recipe.yaml").read_text())["run"]["steps"]
        early = freeze(process) and metrics(out)[-1]["step"] + left <= steps and not (out / "export").exists()
        below = descendants(process.pid)
        (disturb if early else kill)(process)
        for helper in below:  # those that end with a process that was killed are no longer below it
            with contextlib.suppress(ProcessLookupError):
                os.kill(helper, signal.SIGCONT)
        thaw(process)
        output, _ = process.communicate(timeout=900)
        if early:
            return process.returncode, output
        shutil.rmtree(out)
    pytest.fail("the run was over before it could be disturbed, five times")


def killed(recipe: Path, out: Path, step: int, delay: float = 0.0) -> None:
    disturbed(kill, recipe, out, step=step, checkpoint=True, delay=delay)


def terminate(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGTERM)


def stop_all(process: subprocess.Popen, number: int = signal.SIGTERM) -> None:
    """Send a signal to all processes of the run, as Slurm does, and then again to the group of the first one, as
    `timeout` and a terminal do. The run was stopped, and goes on."""
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    thaw(process)
    time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@pytest.mark.slow
def test_a_run_with_gradients_computed_during_generation_resumes_exactly(tmp_path):
    """With engines in processes PIPO's gradient is computed before phi is known and is not in a checkpoint. Killed and
    resumed, the run ends with the weights of the colocated run. Other forward passes come between the gradient and its
    step, and Megatron gathers parameters in forward passes."""
    recipe = write_recipe(
        tmp_path,
        pipo={"window": 2, "learning_rate": 1e-2},
        megatron={"overlap_grad_reduce": True, "overlap_param_gather": True},
        optimizer={"lr": 1e-2, "use_distributed_optimizer": True},
    )
    ranks, process, out = ("--nproc", "2"), "rollout.placement=process", tmp_path / "process"
    status, output = train(recipe, *ranks)
    assert status == 0, output[-3000:]
    disturbed(kill, recipe, out, *ranks, process, step=5, checkpoint=True)
    status, output = train(recipe, *ranks, process, f"run.output_dir={out}")
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert any(line.get("pipo/reinforced") for line in metrics(out)[:-1]), "no gradient waited: this proves little"
    assert_same_weights(out, tmp_path / "run")
    assert_same_verification(out, tmp_path / "run")


def assert_same_weights(run: Path, other: Path) -> None:
    assert (run / "export/model.safetensors").read_bytes() == (other / "export/model.safetensors").read_bytes()


def assert_same_verification(run: Path, other: Path) -> None:
    names = ("verification/loss", "verification/grad_norm", "policy/grad_norm")
    found = [[[line.get(name) for name in names] for line in metrics(each)] for each in (run, other)]
    assert found[0] == found[1]


def test_a_run_with_staleness_1_resumes_exactly(tmp_path):
    """The pending batch is in the checkpoint, with the engine's experts for it and for PIPO's previous batch. The
    weights that sample a batch do not depend on timing."""
    recipe = write_recipe(
        tmp_path,
        rollout={"placement": "process", "staleness": 1},
        algorithm={"importance": "truncated"},
        pipo={"window": 2, "learning_rate": 1e-2},
    )
    make_mixture(tmp_path)
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    expected = metrics(tmp_path / "run")
    assert [line["rollout/staleness"] for line in expected[1:]] == [0, 1, 1, 1, 1, 1]
    assert any("verification/grad_norm" in line for line in expected)
    out = tmp_path / "killed"
    killed(recipe, out, step=2)
    status, output = train(recipe, f"run.output_dir={out}")
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert_same_run(out, tmp_path / "run")
    loads = [[json.loads(line)["layers"] for line in (run / "experts.jsonl").open()] for run in (out, tmp_path / "run")]
    assert loads[0] == loads[1] and len(loads[0]) == 6 and len(loads[0][0]["1"]) == 4


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_all_processes_saves_and_says_so(undisturbed, tmp_path, number):
    """Also while a checkpoint is written: there is one after each step."""
    folder, expected = undisturbed
    out, every, begin = tmp_path / "run", "checkpoint.every=1", partial(start, program=(ONE_INTERRUPT,))
    disturb, when = partial(stop_all, number=number), {"step": 2, "left": 2}
    status, output = disturbed(disturb, folder / "recipe.yaml", out, every, **when, begin=begin)
    assert status == 75 and f"stopped by {number.name}" in output, output
    assert [path for path in out.glob("checkpoints/*") if path.suffix] == [], "incomplete checkpoints"
    assert (output.count("stopping after this step; Ctrl-C again to kill") == 1) == (number == signal.SIGINT)
    status, output = train(folder / "recipe.yaml", f"run.output_dir={out}", every)
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert re.search(r"pass@1 \S+ ± \S+ -> ", output), "the first test result, from before the stop"
    assert_same_run(out, expected)


def test_a_signal_to_two_ranks_with_engines_and_graders(tmp_path):
    """Launcher, ranks, engine processes and the processes that grade get it, while they work."""
    recipe = write_recipe(tmp_path, rollout={"placement": "process"}, reward={"kind": "math"})
    status, output = train(recipe, "--nproc", "2")
    assert status == 0, output[-3000:]
    out = tmp_path / "stopped"
    number = partial(stop_all, number=signal.SIGUSR1)
    status, output = disturbed(number, recipe, out, "--nproc", "2", step=2, left=2)
    assert status == 75 and "stopped by SIGUSR1" in output, output
    assert "engine process" not in output, output  # none was lost
    status, output = train(recipe, "--nproc", "2", f"run.output_dir={out}")
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert_same_run(out, tmp_path / "run")


@pytest.mark.slow
def test_killed_rank_is_named_and_two_ranks_resume_as_one(undisturbed, tmp_path):
    """The launcher names the killed rank 1 of two, and the run resumes in another layout."""
    folder, expected = undisturbed
    out = tmp_path / "run"
    layout = ["--nproc", "2", "megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=true"]
    process = start(folder / "recipe.yaml", f"run.output_dir={out}", "run.steps=1000", *layout, forked=False)
    assert wait_until((out / "checkpoints/step_000002").exists, process)
    os.kill(rank_pid(process.pid, 1), signal.SIGKILL)
    output, _ = process.communicate(timeout=900)  # and not after half an hour, when gloo gives up
    assert process.returncode == 3, output
    assert "rank 1 was killed by SIGKILL; the other ranks were stopped" in output
    last = int(latest(out / "checkpoints").name.removeprefix("step_"))
    status, output = train(folder / "recipe.yaml", f"run.output_dir={out}", f"run.steps={last + 2}")
    assert status == 0 and f"resumed after step {last}" in output, output[-3000:]
    assert [line["step"] for line in metrics(out)] == list(range(last + 3))
    rewards, wanted = ([line.get("reward/mean") for line in metrics(run)] for run in (out, expected))
    shared = min(len(rewards), len(wanted))
    assert rewards[:shared] == wanted[:shared]


def test_killed_while_each_rank_writes_its_part_of_a_checkpoint(tmp_path):
    """The checkpoint before it stays the newest and is intact, and the resumed run ends with the same weights."""
    sharded = {
        "checkpoint": {"every": 2},
        "optimizer": {"lr": 1e-2, "use_distributed_optimizer": True},
    }
    recipe, out, ranks = write_recipe(tmp_path, **sharded), tmp_path / "killed", ("--nproc", "2")
    status, output = train(recipe, *ranks)
    assert status == 0, output[-3000:]
    folder = f"run.output_dir={out}"
    process = start(recipe, folder, *ranks, program=(KILLED_IN_SAVE,), KILL_IN_SAVE="step_000004")
    process.communicate(timeout=900)
    assert process.returncode != 0
    (torn,) = out.glob("checkpoints/step_000004.*.partial/optimizer_00001.new")
    with pytest.raises(SafetensorError):
        load_file(torn)
    newest = latest(out / "checkpoints")
    assert newest.name == "step_000002" and not damage(newest) and len(list(newest.glob("optimizer_*"))) == 2
    status, output = train(recipe, folder, *ranks)
    assert status == 0 and "resumed after step 2" in output, output[-3000:]
    assert not list(out.glob("checkpoints/*.partial"))
    assert_same_weights(out, tmp_path / "run")


def rank_pid(launcher: int, rank: int) -> int:
    """The launcher's child with that rank in its environment."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{child}/environ").read_bytes():
            return int(child)
    raise AssertionError(f"no rank {rank} among {children}")


def test_a_resume_says_what_has_changed_under_the_run(tmp_path):
    recipe = write_recipe(tmp_path)
    assert train(recipe, "run.steps=1")[0] == 0
    status, output = train(recipe, "run.steps=2")
    assert status == 0 and "is no longer" not in output, output[-3000:]
    rows = (tmp_path / "train.jsonl").read_text().splitlines(True)
    (tmp_path / "train.jsonl").write_text("".join(reversed(rows)))
    status, output = train(recipe, "run.steps=3")
    assert status == 0 and "data.train is no longer what it was in the checkpoint of step 2" in output, output[-3000:]
    assert "model.path is no longer" not in output


def test_a_second_start_in_a_folder_is_refused_and_changes_nothing(tmp_path):
    """Nor does it where it would start a launcher. The first run ends with each step once."""
    recipe, out = write_recipe(tmp_path, run={"steps": 8}), tmp_path / "run"

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.suffix != ".position"}

    def start_again(first: subprocess.Popen) -> None:
        before = files()
        for arguments in ([], ["--nproc", "2"]):
            status, output = train(recipe, *arguments)
            assert status == 2 and f"process {first.pid} on" in output and "trains there" in output, output[-3000:]
        assert files() == before

    status, output = disturbed(start_again, recipe, out, step=2)
    assert "taken over" not in output and status == 0
    assert [line["step"] for line in metrics(out)] == list(range(9))

    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:3] + lines[5:7] + lines[8:]))
    status, output = train(recipe, "run.steps=9")
    assert status == 0, output[-3000:]
    assert "metrics.jsonl has no lines of 3 steps, of which step 3 is the first: " in output, output[-3000:]
    assert out.stat().st_mode & 0o777 == 0o750 and (out / "metrics.jsonl").stat().st_mode & 0o777 == 0o640
