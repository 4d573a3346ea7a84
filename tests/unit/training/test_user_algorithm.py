"""An algorithm in a user's file, used from a recipe."""

import json

import pytest
import torch
import yaml

from megatron_rft.config import dump, load
from megatron_rft.records import Batch
from megatron_rft.training.online import build_objective
from megatron_rft.utils.errors import CodeError, ConfigError
from tests.unit.config.test_config import SHAPE

CODE = """
from typing import Annotated, Literal
from pydantic import Field
from megatron_rft.config.algorithms import online
from megatron_rft.config.sections import Section
from megatron_rft.objectives.base import PolicyObjective, Prepared, Update
from megatron_rft.objectives.grpo import GRPO

class BonusOptions(online.GRPO):
    bonus: float = 0.1
    share: Annotated[float, Field(le=1)] = 0.5
    shape: Literal["flat", "steep"] = "flat"

class Bonus(GRPO):
    options: BonusOptions

class Scale(Section):
    scale: float

class Small(PolicyObjective):
    options: Scale
    def advantages(self, batch): ...
    def surrogate(self, outputs, batch): ...
    def prepare(self, batch, state): ...

class Half(PolicyObjective):
    pass

class Careless(GRPO):
    bonus: float = 0.1

class Untyped(GRPO):
    options: float

class Greedy(GRPO):
    needs = frozenset({"old_logprob"})

class Valued(GRPO):
    needs = frozenset({"values"})

class Misspelt(GRPO):
    def advantage_(self, batch):
        return batch.shaped_rewards

class Helped(GRPO):
    def advantage(self, batch):
        return super().advantages(batch)

    def advantages(self, batch):
        return self.advantage(batch)

class Forgetful(GRPO):
    def prepare(self, batch, state):
        super().prepare(batch, state)

class Bare(GRPO):
    def clip(self, log_ratio, batch, advantages):
        return log_ratio * advantages
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """(objective's name, options, other sections) -> the objective."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(SHAPE))

    def make(name: str, options: dict = {}, **sections):  # noqa: B006
        content = {
            "run": {"output_dir": "out", "steps": 20},
            "model": {"path": "model"},
            "data": {"train": "examples/quickstart/arithmetic.py:rows"},
            "rollout": {"prompts_per_step": 8, "group_size": 4, "max_response_tokens": 32},
            "algorithm": {"name": "own", "objective": f"mine.py:{name}", **options},
            **sections,
        }
        (tmp_path / "rl.yaml").write_text(yaml.safe_dump(content))
        recipe = load(tmp_path / "rl.yaml")
        (tmp_path / "again.yaml").write_text(dump(recipe))
        assert load(tmp_path / "again.yaml") == recipe
        return build_objective(recipe.algorithm, recipe.setting, recipe.plugins)

    return make


def test_options_are_the_fields(made):
    objective = made("Bonus", {"bonus": 1, "clip_low": 0.1, "mini_batch_prompts": 4, "shape": "steep"})
    options, setting = objective.options, objective.setting
    assert (options.bonus, options.clip_low, options.shape, options.kl_coefficient) == (1, 0.1, "steep", 0.001)
    assert (setting.mini_batches, setting.max_response_tokens) == (2, 32)


def test_a_section_of_its_own_alone(made):
    assert made("Small", {"scale": 2.0}).options.model_dump() == {"scale": 2.0}


def test_inside_pipo(made):
    assert made("Bonus", pipo={"window": 2}).base.options.bonus == 0.1


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("Bonus", {"bonsu": 1.0}, "algorithm.bonsu: there is no such option. Did you mean 'bonus'?"),
        ("Bonus", {"bonus": "much"}, "algorithm.bonus: 'much' is not a number"),
        ("Bonus", {"share": 2.0}, "algorithm.share: 2.0 is not at most 1"),
        ("Bonus", {"shape": "step"}, "algorithm.shape: 'step' is not one of flat, steep"),
        ("Bonus", {"max_response_tokens": 3}, "algorithm.max_response_tokens: there is no such option. There are: "),
        ("Small", {}, "algorithm.scale: is required"),
        ("Small", {"scale": 1.0, "epochs": 2}, "algorithm.epochs does nothing: Small has no field epochs"),
        ("Small", {"scale": 1.0, "mini_batch_prompts": 2}, "algorithm.mini_batch_prompts does nothing"),
        ("Half", {}, "does not define advantages, prepare, surrogate"),
        ("Careless", {}, "Careless has fields of its own (bonus)"),
        ("Untyped", {}, "the options of Untyped must be a class that derives from Section"),
        (
            "Bonus",
            {"kl_coefficient": 0.0, "kl_in": "reward"},
            "algorithm.kl_in: does nothing while kl_coefficient is 0",
        ),
        ("Greedy", {}, "Did you mean 'old_logprobs'?"),
        ("Valued", {}, "critic: is missing"),
        ("Section", {}, "no class that derives from"),
        ("Misspelt", {}, "nothing calls Misspelt.advantage_. Did you mean 'advantages'?"),
    ],
)
def test_what_would_not_work_is_refused(made, name, options, problem):
    with pytest.raises(ConfigError) as error:
        made(name, options)
    assert problem in str(error.value)


def test_a_helper_may_have_a_name_like_a_hook(made):
    assert made("Helped").options.name == "grpo"


@pytest.mark.parametrize("sections", [{}, {"pipo": {"window": 2}}])
def test_what_prepare_returns_is_checked(made, sections):
    objective = made("Forgetful", **sections)
    ones = {"rollout_logprobs": torch.zeros(2), "ref_logprobs": torch.zeros(2)}
    of_sequences = {"group": torch.tensor([0, 0]), "rewards": torch.tensor([1.0, 0.0])}
    batch = Batch.of([[1], [1]], [[5], [7]], tokens=ones, sequences=of_sequences)
    batch = batch.with_scalars(sampled_reward_sum=1.0, sampled_count=2.0)
    words = r"prepare \(mine.py, line \d+\) returned None: return Prepared\(updates, state, metrics\)"
    with pytest.raises(CodeError, match=words):
        objective.prepare(batch, objective.init())


def test_what_clip_returns_is_checked(made):
    words = r"clip \(mine.py, line \d+\) returned tensor.*: return Clipped\(terms, ratio, clipped\)"
    with pytest.raises(CodeError, match=words):
        made("Bare").clip(torch.zeros(2), None, torch.ones(2))


def test_sections_without_effect(made):
    with pytest.raises(ConfigError, match="critic: the objective needs no values"):
        made("Bonus", critic={"lr": 1e-5})
    with pytest.raises(ConfigError, match="model.reference does nothing"):
        made("Bonus", {"kl_coefficient": 0.0}, model={"path": "model", "reference": "model"})


def test_code_as_a_name_is_told_where_it_goes(made):
    with pytest.raises(ConfigError, match="write name: own, objective: mine.py:Bonus"):
        made("Bonus", {"name": "mine.py:Bonus"})
