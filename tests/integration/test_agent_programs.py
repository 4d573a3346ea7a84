"""Whole runs with a program whose episodes have several segments: beside each other feature, on two ranks, killed."""

import argparse
import contextlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_rft.commands import environment
from megatron_rft.config import load
from megatron_rft.launching.hangs import descendants
from megatron_rft.plan.vllm import unusable
from megatron_rft.tracking.metrics import NOTES_FILE, SAMPLES_FILE
from megatron_rft.utils.errors import RunFailed
from megatron_rft.utils.files import read_json_lines
from tests.integration.test_kill_and_resume import assert_same_run, assert_same_weights
from tests.integration.tiny import freeze, kill, make_mixture, metrics, start, thaw, train, wait_until, write_recipe

pytest.importorskip("aiohttp")
AGENT = Path(__file__).with_name("tiny_agent.py")
PROGRAM = {
    "kind": "program",
    "command": [sys.executable, "-S", str(AGENT)],  # it needs no packages
    "max_turns": 5,
    "turn_tokens": 2,
    "score": f"{AGENT}:grade",
    "processes": 2,
}
ROLLOUT = {"max_response_tokens": 12, "group_size": 4}


def write(folder: Path, evaluates: bool = False, **sections) -> Path:
    """`evaluates`: a test before and after the training. Each of its episodes is a process."""
    sections |= {} if evaluates else {"data": {"test": None}}
    sections["rollout"] = ROLLOUT | sections.get("rollout", {})
    sections["environment"] = PROGRAM | sections.get("environment", {})
    return write_recipe(folder, **{"run": {"steps": 2}} | sections)


def check(folder: Path) -> list[dict]:
    lines = [line for line in metrics(folder / "run") if line["step"]]
    for line in lines:
        assert line["environment/errors"] == 0
        assert line["environment/turns_mean"] == 5 and line["environment/segments_mean"] == 4
        assert line["reward/mean"] > 0 and line["policy/grad_norm"] > 0
    return lines


PARTS = {
    "evaluation": {"evaluates": True},
    "lora": {"lora": {"rank": 4, "alpha": 8.0}},
    "truncated": {"rollout": {"top_k": 3, "top_p": 0.9}},
    "process": {"rollout": {"placement": "process"}},
    "stale": {"rollout": {"placement": "process", "staleness": 1}, "algorithm": {"importance": "truncated"}},
    "pipo": {"pipo": {"window": 2, "learning_rate": 1e-2}, "algorithm": {"old_logprobs": "recompute"}},
    "ppo": {"algorithm": {"name": "ppo", "kl_coefficient": None}, "critic": {"lr": 1e-3}},
}


@pytest.mark.parametrize("name", PARTS)
def test_beside_another_feature(tmp_path, name):
    status, output = train(write(tmp_path, **PARTS[name]))
    assert status == 0, output[-3000:]
    assert f"reward: environment.score, {AGENT}:grade" in output
    last = check(tmp_path)[-1]
    if name in ("evaluation", "truncated", "process", "ppo"):
        assert abs(last["mismatch/kl"]) < 1e-6, "the trainer's log-probs are the engine's"


def test_with_the_experts_of_the_engine(tmp_path):
    recipe = write(tmp_path)
    make_mixture(tmp_path)
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    last = check(tmp_path)[-1]
    assert abs(last["mismatch/kl"]) < 1e-6


def with_vllm(recipe: Path) -> Path:
    """Its CPU build has no attention for the tiny heads."""
    config = recipe.with_name("model") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"head_dim": 32}))
    return recipe


@pytest.mark.slow
@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
@pytest.mark.parametrize(
    "options",
    [
        {"placement": "colocated"},
        {"placement": "process"},
        {"placement": "server", "staleness": 2},
        {"placement": "process", "staleness": 2, "cache_after_sync": "recompute"},
    ],
    ids=["rank", "process", "server", "partial"],
)
def test_with_vllm(tmp_path, options):
    stale = {"algorithm": {"importance": "truncated"}} if options.get("staleness") else {}
    recipe = with_vllm(write(tmp_path, rollout={"engine": "vllm"} | options, run={"steps": 4}, **stale))
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    assert len(check(tmp_path)) == 4


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    return one_step(tmp_path_factory.mktemp("one_rank"))


def one_step(folder: Path, *arguments: str) -> tuple[float, float, dict]:
    """The norm of the gradients of the first step, its reward, and the weights after it."""
    optimizer = {"lr": 1e-3, "adam_eps": 1e-3}  # with a small eps Adam makes a large step of a gradient's last bits
    status, output = train(write(folder, run={"steps": 1}, optimizer=optimizer), *arguments)
    assert status == 0, output[-3000:]
    (line,), weights = check(folder), load_file(folder / "run/export/model.safetensors")
    return line["policy/grad_norm"], line["reward/mean"], weights


LAYOUTS = {
    "data": [],
    "tensor": ["megatron.tensor_model_parallel_size=2", "megatron.sequence_parallel=true"],
    "pipeline": ["megatron.pipeline_model_parallel_size=2"],
    "context": ["megatron.context_parallel_size=2"],
}


@pytest.mark.parametrize(
    "layout", ["data", *(pytest.param(each, marks=pytest.mark.slow) for each in list(LAYOUTS)[1:])]
)
def test_two_ranks_take_the_same_step(tmp_path, one_rank, layout):
    norm, reward, weights = one_rank
    other_norm, other_reward, others = one_step(tmp_path, "--nproc", "2", *LAYOUTS[layout])
    assert reward == other_reward and norm == pytest.approx(other_norm, rel=1e-5)
    assert max(torch.dist(weights[name], others[name]) for name in weights) < 1e-5


NEEDS_VLLM = [pytest.mark.slow, pytest.mark.skipif(unusable() is not None, reason=str(unusable()))]


@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=NEEDS_VLLM)])
def test_killed_in_a_step_and_resumed_it_ends_with_the_same_bits(tmp_path, engine):
    """Episodes that had ended since the checkpoint are not played again, unless others were in waves with them that had
    not. Nothing of the killed run's programs is left. vLLM in a process plays each episode at its own pace."""
    plays, out = tmp_path / "plays", tmp_path / "killed"
    counted = {"command": [*PROGRAM["command"], str(plays)], "programs": 4}  # a group after the other
    rollout = {"engine": engine, "placement": "process" if engine == "vllm" else "colocated"}
    sections = {"run": {"steps": 3}, "checkpoint": {"every": 1}, "environment": counted, "rollout": rollout}
    recipe = write(tmp_path, evaluates=True, **sections)
    recipe = with_vllm(recipe) if engine == "vllm" else recipe
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    evaluated = (len(plays.read_text().split()) - 3 * 16) // 2
    ended = killed_in_a_step(recipe, out, step=3, ended=8)
    plays.unlink()
    status, output = train(recipe, f"run.output_dir={out}")
    assert status == 0, output[-3000:]
    done = int(re.findall(r"resumed after step (\d)", output)[0])
    assert done in (1, 2), "the checkpoint of step 2 may not have been complete"
    assert len(plays.read_text().split()) == 16 - ended + evaluated
    if engine == "hf":
        assert ended % 4 == 0
        assert_same_run(out, tmp_path / "run")
    else:  # the last bits of the engine's log-probs depend on what is in its batch, and are not trained
        assert_same_weights(out, tmp_path / "run")
    assert not list(tmp_path.glob("*/environment/kept"))
    assert "does not repeat itself" not in output


def killed_in_a_step(recipe: Path, out: Path, step: int, ended: int) -> int:
    """Kill a run when at least `ended` of the episodes of `step` are kept, and another one has had four turns. Returns
    the number of those that are kept. The run is stopped meanwhile; what ends its programs with it is not."""

    def keys(ending: str = "") -> set[str]:
        """Of the episodes that are kept, or of those that have had a call."""
        lines = (line for path in out.glob(f"environment/kept/{step - 1:06d}_*") for line in read_json_lines(path))
        found = (key.partition(".") for line in lines for key in line)
        return {key for key, _, call in found if call == ending}

    def in_the_middle() -> bool:
        return len(keys()) >= ended and bool(keys("2") & keys("3") - keys())  # calls in parallel end in any order

    for _ in range(5):
        process = start(recipe, f"run.output_dir={out}")
        while wait_until(in_the_middle, process) and freeze(process, below=False):
            if in_the_middle():
                started = descendants(process.pid)
                kill(process)
                process.wait()
                assert started and wait_until(lambda: not alive(started))  # noqa: B023
                return len(keys())
            thaw(process)
        process.communicate()
        shutil.rmtree(out)
    pytest.fail("the step was over before the run could be killed, five times")


def alive(processes: list[int]) -> list[int]:
    """Those that are more than an entry, which their parent has not read."""
    found = []
    for pid in processes:
        with contextlib.suppress(OSError):
            found += [pid] if Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


def test_a_program_that_does_not_repeat_itself_is_named_and_leaves_the_run_valid(tmp_path):
    anew = {"command": [*PROGRAM["command"], "time", str(tmp_path / "plays")], "programs": 4}
    recipe = write(tmp_path, run={"steps": 3}, checkpoint={"every": 1}, environment=anew)
    killed_in_a_step(recipe, tmp_path / "run", step=2, ended=4)
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    assert all(abs(line["mismatch/kl"]) < 1e-6 for line in check(tmp_path))
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]
    named = r"environment .*: problem \d+, answer \d: the program does not repeat itself: before .* call [34] was"
    notes = [line["note"] for line in read_json_lines(tmp_path / "run" / NOTES_FILE)]
    assert len(re.findall(named, output)) == 1 == sum(bool(re.match(named, note)) for note in notes), output[-3000:]


def test_the_check_names_a_program_that_does_not_repeat_itself(tmp_path):
    anew = {"command": [*PROGRAM["command"], "time"]}
    arguments = argparse.Namespace(loaded=load(write(tmp_path, environment=anew), []), episodes=4, turns=None)
    with pytest.raises(RunFailed, match=r"problem [0-3](, answer \d+)?: .* the second time"):
        environment.run(arguments)


def test_samples_have_the_segments(tmp_path):
    status, output = train(write(tmp_path, run={"steps": 1}))
    assert status == 0, output[-3000:]
    (sample, *_) = [each for line in read_json_lines(tmp_path / "run" / SAMPLES_FILE) for each in line["samples"]]
    assert len(sample["turns"]) == 5 and len(sample["segments"]) >= 4
