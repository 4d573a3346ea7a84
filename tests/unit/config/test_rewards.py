import importlib
import inspect

import pytest
import yaml

from megatron_rft import config
from megatron_rft.config.rewards import REWARDS, SECTIONS, RewardOptions
from megatron_rft.rewards.worker import Grader
from megatron_rft.utils.errors import ConfigError

BASE = {
    "run": {"output_dir": "x", "steps": 1},
    "model": {"path": "m"},
    "data": {"train": "examples/quickstart/arithmetic.py:rows"},
}


def load(tmp_path, reward: dict):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(BASE | {"reward": reward}))
    return config.load(path)


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        ({"kind": "maths"}, "Did you mean 'math'"),
        ({"kind": "choice", "timeout_s": 3.0}, "reward.timeout_s: does nothing with kind choice"),
        ({"kind": "code", "workers": 0}, "reward.workers: 0 is not at least 1"),
        ({"kind": "format"}, "reward.tags: is required with kind format"),
        ({"kind": "model"}, "reward.model: is required"),
        ({"kind": "model", "model": "m", "template": "{question}"}, "must have {response}, may have {prompt}"),
        ({"kind": "model", "model": "m", "template": "{prompt}"}, "reward.template: '{prompt}' must have {response}"),
        ({"weight": 2.0}, "reward.weight: is for the parts of a sum"),
        ({"kind": "sum"}, "reward.parts: is required"),
        ({"kind": "sum", "parts": [{"kind": "choice", "shaping": True}]}, "at least one must be a verifier"),
        ({"kind": "sum", "parts": [{"kind": "choice"}, {"kind": "choice"}]}, "two are called 'choice'"),
        ({"kind": "sum", "parts": [{"kind": "choice", "max_error_share": 0.1}]}, "set reward.max_error_share"),
        ({"kind": "by_row", "kinds": {"a": {"kind": "choice", "weight": 2.0}}}, "is for the parts of a sum"),
    ],
)
def test_what_would_do_nothing_or_fail_is_refused(reward, problem, tmp_path):
    with pytest.raises(ConfigError) as error:
        load(tmp_path, reward)
    assert problem in str(error.value)


def test_every_kind_can_be_built_and_has_options():
    for kind, (section, made_by) in REWARDS.items():
        assert section.model_fields["kind"].default == kind
        module, _, name = made_by.rpartition(".")
        verifier = getattr(importlib.import_module(f"megatron_rft.rewards.{module}"), name)
        own = section.model_fields.keys() - RewardOptions.model_fields.keys()
        taken = inspect.signature(verifier).parameters.keys() - {"args", "kwargs"}
        if kind == "own":  # its processes take the rest
            taken = taken - {"options"} | inspect.signature(Grader).parameters.keys()
        assert own == taken, kind


def test_a_nested_section_can_be_written_and_read_again(tmp_path):
    parts = [{"kind": "math"}, {"kind": "format", "tags": ["a"], "weight": 0.5, "shaping": True}]
    recipe = load(tmp_path, {"kind": "by_row", "kinds": {"x": {"kind": "sum", "parts": parts}, "y": {"kind": "code"}}})
    again = SECTIONS["by_row"].model_validate(recipe.reward.model_dump())
    assert again == recipe.reward and "memory_mb" not in recipe.reward.model_dump()["kinds"]["x"]
