"""`megatron-rft environment check` says what is not the same when an environment is played again."""

import argparse
import json
from pathlib import Path

import pytest

from megatron_rft.commands import environment
from megatron_rft.config import load
from megatron_rft.utils.errors import DataError, RunFailed
from tests.integration.tiny import write_recipe

WORLDS = Path(__file__).parents[1] / "environments/worlds.py"


@pytest.fixture
def check(tmp_path):
    def of(world: str, turns: str | None = None) -> int:
        path = tmp_path / "turns.jsonl"
        path.write_text(turns or "")
        section = {"kind": "own", "episode": f"{WORLDS}:{world}", "max_turns": 4, "processes": 1}
        recipe = load(write_recipe(tmp_path, environment=section, rollout={"max_response_tokens": 8}), [])
        return environment.run(argparse.Namespace(loaded=recipe, episodes=3, turns=turns and path))

    return of


def test_an_environment_that_says_the_same(check, capsys):
    assert check("Echo") == 0 and check("Random", turns='["a", "b"]\n["c"]') == 0
    assert "Random: 2 episodes" in (printed := capsys.readouterr().out) and "it was the same" in printed
    assert check("Numpy", turns='["1"]') == 0
    assert "\nreward 1.5, score 0.5\n" in capsys.readouterr().out  # 1 for the only turn
    assert check("Echo", turns='["1"]') == 0
    assert "01<eos>" in capsys.readouterr().out.partition("as the policy reads it:\n")[2].splitlines()[0]


def test_what_is_not_the_same_and_what_fails_is_named(check):
    with pytest.raises(RunFailed, match=r"problem 0, answer [1-4]: .*, the second time "):
        check("Fickle", turns=json.dumps(["a"] * 4))
    with pytest.raises(RunFailed, match=r"environment Fails, problem 0, turn 1: NotImplementedError"):
        check("Fails")
    for turns in ('{"a": 1}', '["a"]\n[]', '["a", 1]'):
        with pytest.raises(DataError, match=r"--turns: .* each line must be a JSON list of texts"):
            check("Echo", turns=turns)
