"""What CONTRIBUTING says of adding something to the package, done to a copy of it: nothing else has to be edited."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SECTION = """
from typing import ClassVar, Literal

from megatron_rft.config.algorithms.base import Clipped
from megatron_rft.config.sections import Positive


class Median(Clipped):
    name: Literal["median"] = "median"
    compares_responses: ClassVar[bool] = True
    scale: Positive = 2.0
"""
OBJECTIVE = """
from torch import Tensor

from megatron_rft.config.algorithms import median as section
from megatron_rft.objectives.policy_gradient import GroupRelative


class Median(GroupRelative):
    options: section.Median

    def relative(self, rewards: Tensor, group: Tensor) -> Tensor:
        return self.options.scale * (rewards - rewards.median())
"""
LINE = '    "median.Median",\n'
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

objective = build_objective(recipe)
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
RECIPE = """
run: {output_dir: out, steps: 4}
model: {path: model}
data: {train: arithmetic}
rollout: {prompts_per_step: 2, group_size: 3}
algorithm: {name: median, kl_coefficient: 0.0}
"""


@pytest.fixture
def package(tmp_path) -> Path:
    """A copy of the package in tmp_path, which a process started there imports."""
    shutil.copytree(ROOT / "megatron_rft", tmp_path / "megatron_rft", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "megatron_rft"


def run(folder: Path, code: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)


def test_an_algorithm_is_two_files_and_a_line(package):
    (package / "config/algorithms/median.py").write_text(SECTION)
    (package / "objectives/median.py").write_text(OBJECTIVE)
    table = package / "config/algorithms/__init__.py"
    first, rest = table.read_text().split("ALGORITHMS = (\n")
    table.write_text(f"{first}ALGORITHMS = (\n{LINE}{rest}")
    (package.parent / "recipe.yaml").write_text(RECIPE)
    done = run(package.parent, USE)
    assert done.returncode == 0, done.stderr
