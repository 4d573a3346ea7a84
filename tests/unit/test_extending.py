"""Follows CONTRIBUTING's instructions for additions in a copy of the package: no other file has to be edited."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, SeedOssConfig

from examples.quickstart import arithmetic

ROOT = Path(__file__).resolve().parents[2]

SECTION = """class Median(Clipped, name="median"):
    compares_responses: ClassVar[bool] = True
    scale: Positive = 2.0


"""
OBJECTIVE = """
from torch import Tensor

from megatron_rft.config.algorithms import online as section
from megatron_rft.objectives.policy_gradient import GroupRelative


class Median(GroupRelative):
    options: section.Median

    def relative(self, rewards: Tensor, group: Tensor) -> Tensor:
        return self.options.scale * (rewards - rewards.median())
"""
LINE = '    "median": (Median, "median.Median"),\n'
USE = """
import sys

import torch

from megatron_rft.config import load
from megatron_rft.utils.errors import ConfigError

recipe = load("recipe.yaml", ["algorithm.scale=3"])
assert recipe.algorithm.scale == 3
for override, words in (
    ("algorithm.scael=3", "Did you mean 'scale'?"),
    ("algorithm.scale=-1", "-1 is not above 0"),
    ("critic.lr=1e-5", "does nothing with algorithm median"),
):
    try:
        load("recipe.yaml", [override])
    except ConfigError as error:
        assert words in str(error), error
    else:
        raise AssertionError(override)

from megatron_rft.objectives.base import counts
from megatron_rft.records import Batch
from megatron_rft.training.online import build_objective

objective = build_objective(recipe.algorithm, recipe.setting)
rewards = torch.tensor([1.0, 0.0, 0.0])
batch = Batch.of(
    [[1]] * 3,
    [[5, 6], [7], [8]],
    tokens={"rollout_logprobs": torch.zeros(4)},
    sequences={"group": torch.zeros(3, dtype=torch.long), "rewards": rewards},
)
(update,) = objective.prepare(batch, objective.init()).updates
assert update.batch.tokens["advantages"].tolist() == [3.0, 3.0, 0.0, 0.0]
(step,) = update.steps()
logprobs = torch.full((4,), -1.0, requires_grad=True)
outputs = {"logprobs": logprobs, "entropy": torch.ones(4)}
update.loss(outputs, step).mean(counts(step)).backward()
assert logprobs.grad.tolist() == [-0.5, -0.5, 0.0, 0.0]  # -3 / 2 tokens / 3 responses
"""
TASK = str(Path(__file__).resolve().parents[2] / "examples/quickstart/arithmetic.py:rows")
RECIPE = """
run: {output_dir: out, steps: 4}
model: {path: model}
data: {train: TASK}
rollout: {prompts_per_step: 2, group_size: 3}
algorithm: {name: median, kl_coefficient: 0.0}
""".replace("TASK", TASK)


@pytest.fixture
def package(tmp_path) -> Path:
    """A copy of the package in tmp_path, which processes started there import."""
    shutil.copytree(ROOT / "megatron_rft", tmp_path / "megatron_rft", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "megatron_rft"


def run(folder: Path, code: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


def test_an_algorithm_is_a_file_a_section_and_a_line(package):
    (package / "objectives/median.py").write_text(OBJECTIVE)
    sections = package / "config/algorithms/online.py"
    before, table = sections.read_text().split("ONLINE:")
    sections.write_text(f"{before}{SECTION}ONLINE:{table}")
    add_line(sections, "objectives/)\n", LINE)
    (package.parent / "recipe.yaml").write_text(RECIPE)
    done = run(package.parent, USE)
    assert done.returncode == 0, done.stderr


BRIEF = """class BriefOptions(RewardOptions, kind="brief"):
    max_tokens: Count


"""
REWARD = """
from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.base import Reward


class BriefReward(Reward):
    maximum = 1.0

    def __init__(self, max_tokens: int):
        self.most = max_tokens

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        return [Score(float(len(text) <= self.most), "brief") for text in texts]
"""
ENGINE = """
from functools import partial

import torch

from megatron_rft.inference.engine import Engine, Group
from megatron_rft.records import Response


class EchoEngine(Engine):
    def __init__(self, config, dtype, device):
        self.dtype, self.weight_version = dtype, 0

    def generate(self, requests, sampling):
        for request in requests:
            tokens = request.prompt_ids[: sampling.max_tokens]
            yield Group(request.id, (Response(tokens, (0.0,) * len(tokens), "length", 0),) * request.n)

    def load_weights(self, stream, version):
        self.weight_version = len(list(stream)) and version

    def checksums(self):
        return {}

    def close(self):
        pass


def builder(config, dtype, options):
    return partial(EchoEngine, config, dtype)
"""
EVALUATED = """
run: {output_dir: out, steps: 4}
model: {path: model}
data: {train: TASK, test: TASK, max_prompt_tokens: 100}
rollout: {engine: hf, max_response_tokens: 4}
evaluation: {limit: 2}
""".replace("TASK", TASK)


def add_line(table: Path, after: str, line: str) -> None:
    text = table.read_text()
    assert text.count(after) == 1
    table.write_text(text.replace(after, after + line))


def command(folder: Path, *arguments: str) -> str:
    """Run the copy's command line in `folder`. Returns its output."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    line = [sys.executable, "-m", "megatron_rft", *arguments]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_model(folder: Path, config: PreTrainedConfig | None = None) -> None:
    """An untrained model with the tokenizer of the arithmetic task."""
    arithmetic.write_model_folder(folder, num_hidden_layers=1)
    config = config or AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.fixture
def recipe(package) -> Path:
    write_model(package.parent / "model")
    (package.parent / "recipe.yaml").write_text(EVALUATED)
    return package.parent / "recipe.yaml"


def completions(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results" / "test.jsonl").read_text().splitlines()]


def test_a_reward_is_a_file_a_section_and_a_line(package, recipe):
    (package / "rewards/brief.py").write_text(REWARD)
    table = package / "config/rewards.py"
    sections, lines = table.read_text().split("REWARDS:")
    table.write_text(f"{sections}{BRIEF}REWARDS:{lines}")
    add_line(table, "under rewards/)\n", '    "brief": (BriefOptions, "brief.BriefReward"),\n')
    options = ["--model", "model", "--out", "results", "reward={kind: brief, max_tokens: 3}"]
    command(package.parent, "evaluate", "recipe.yaml", *options)
    found = completions(package.parent)
    assert len(found) == 2 and all(each["reward"] == float(len(each["text"]) <= 3) for each in found)
    refused = ["plan", "recipe.yaml", "reward={kind: brief, timeout_s: 2}"]
    with pytest.raises(AssertionError, match=r"reward\.timeout_s: does nothing with kind brief"):
        command(package.parent, *refused)


def test_an_engine_is_a_folder_and_a_line(package, recipe):
    (package / "inference/echo").mkdir()
    (package / "inference/echo/__init__.py").touch()
    (package / "inference/echo/engine.py").write_text(ENGINE)
    add_line(package / "config/engines.py", "ENGINES = {\n", '    "echo": EngineKind(),\n')
    options = ["--model", "model", "--out", "results", "--engine", "echo"]
    command(package.parent, "evaluate", "recipe.yaml", *options)
    assert all(each["prompt"].startswith(each["text"]) for each in completions(package.parent))
    assert "engine: echo" in command(package.parent, "plan", "recipe.yaml", "--engine", "echo")
    with pytest.raises(AssertionError, match="engine: echo has no server"):
        command(package.parent, "plan", "recipe.yaml", "--engine", "echo", "rollout.placement=server")


def test_a_family_is_a_table(package, recipe):
    """`convert` compares names, shapes and bits of both formats, and `diagnose` megatron-core with transformers."""
    line = '    "seed_oss": Family("SeedOssForCausalLM", ATTENTION | QKV_BIAS | MLP_NORM | DENSE),\n'
    add_line(package / "families/tables.py", "FAMILIES = {  # by `model_type`\n", line)
    known = AutoConfig.from_pretrained(package.parent / "model")
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape = {name: getattr(known, name) for name in (*sizes, "head_dim", "vocab_size", "max_position_embeddings")}
    write_model(package.parent / "model", SeedOssConfig(**shape, pad_token_id=None))
    told = command(package.parent, "convert", "model", "converted")
    assert "names, shapes and bits equal the source's" in told
    told = command(package.parent, "diagnose", "recipe.yaml", "--prompts", "2")
    assert "weights, tokens, masks and temperature are right" in told
    assert "MiB of weights" in command(package.parent, "plan", "recipe.yaml")
    command(package.parent, "evaluate", "recipe.yaml", "--model", "converted", "--out", "results")
    assert len(completions(package.parent)) == 2
