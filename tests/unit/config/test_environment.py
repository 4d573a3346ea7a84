"""The section `environment`: what is refused, with the option and the fix."""

import pytest
import yaml

from megatron_rft.config import dump, load
from megatron_rft.utils.errors import ConfigError

RECIPE = {
    "run": {"output_dir": "x", "steps": 10},
    "model": {"path": "m"},
    "data": {"train": "examples/quickstart/arithmetic.py:rows"},
    "rollout": {"max_response_tokens": 64},
    "environment": {"kind": "own", "episode": "a.py:A"},
}


@pytest.fixture
def loaded(tmp_path):
    def of(*overrides: str):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
        return load(tmp_path / "recipe.yaml", list(overrides))

    return of


def test_a_kind_has_its_own_options(loaded, tmp_path):
    recipe = loaded("environment.max_turns=3")
    assert recipe.environment.name == "A" and recipe.environment.code == ["a.py:A"]
    assert recipe.environment.own_options() == {"kind": "own", "episode": "a.py:A"}
    (tmp_path / "again.yaml").write_text(dump(recipe))
    assert load(tmp_path / "again.yaml") == recipe


REFUSED = {
    "environment.kind=owned": r"environment.kind: 'owned' is not one of own, tools, python",
    "environment.episodes=b.py:B": r"environment.episodes: there is no such option. Did you mean 'episode'",
    "environment.functions=[a]": r"environment.functions: does nothing with kind own, only with tools",
    "environment.max_turns=0": r"environment.max_turns: 0 is not at least 1",
    "environment.turn_tokens=64": r"environment.turn_tokens: 64 does nothing: rollout.max_response_tokens, 64",
    "environment={kind: tools, episode: null, functions: []}": "environment.functions",
    "environment={kind: tools, episode: null, functions: ['a.py:f', 'b.py:f']}": "two functions are called 'f'",
    "environment={kind: python, episode: null, turn_timeout_s: 9.0}": "9 s is less than a program may take, 2 x 5 s",
}


@pytest.mark.parametrize("override", REFUSED)
def test_refused(loaded, override):
    with pytest.raises(ConfigError, match=REFUSED[override]):
        loaded(override)


def test_what_it_does_not_work_with(loaded):
    with pytest.raises(ConfigError, match="environment: does not work with a dynamic constraint"):
        loaded("constraint={kind: dynamic, eta: 0.01}", "reward={kind: math}")
    with pytest.raises(ConfigError, match="environment: does nothing: this run samples no responses"):
        loaded("trainer=sft", "environment.max_turns=2")
    assert loaded("trainer=sft", "data.test=examples/quickstart/arithmetic.py:rows").environment, "evaluations play it"
