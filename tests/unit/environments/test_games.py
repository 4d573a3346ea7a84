"""Real worlds of gymnasium and textarena, and what the policy sees of them."""

import json

import pytest

from megatron_rft.config.environment import LibraryGame
from megatron_rft.environments.games import GymnasiumEnvironment, TextArenaEnvironment
from megatron_rft.environments.process import EnvironmentProcesses
from megatron_rft.environments.schemas import schemas
from megatron_rft.records import Prompt
from megatron_rft.utils.errors import ConfigError

LAKE = {"id": "FrozenLake-v1", "options": {"is_slippery": False, "render_mode": "ansi"}}
INSTALL = "is not installed (tools/setup_env.sh cpu,games)"


def problem(index: int = 3, **fields) -> Prompt:
    return Prompt(index, (), "", "", fields)


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium", reason=f"gymnasium {INSTALL}")


def made(options: dict, kind=GymnasiumEnvironment):
    return kind(**kind.shared(**options))


def test_a_walk_over_the_lake(gymnasium):
    lake = made(LAKE)
    assert lake.reset(problem(), seed=0).splitlines()[0] == "[S]FFF"
    assert lake.step("I go to the left, 7").text == "That is no action of Discrete(4)."
    assert lake.step("left").text == "That is no action of Discrete(4)."
    turns = [lake.step(f"2 is right, 1 is down. I take {move}") for move in (2, 2, 1, 1, 1, 2)]
    assert "SF[F]F" in turns[1].text and not any(turn.done for turn in turns[:-1])
    assert turns[-1].done and [turn.reward for turn in turns] == [0, 0, 0, 0, 0, 1]
    assert lake.score().reward == 0.0 and lake.score().right, "the turns have the rewards"
    lake.reset(problem(), seed=0)
    assert [lake.step(str(move)).done for move in (2, 1)] == [False, True] and not lake.score().right


def test_a_problem_is_one_world_for_all_responses(gymnasium):
    first, second = (made({"id": "Blackjack-v1", "options": {}}) for _ in range(2))
    cards = [first.reset(problem(index), seed=index) for index in range(9)]
    assert cards == [second.reset(problem(index), seed=99) for index in range(9)]
    assert cards[4] == first.reset(problem(seed=4), seed=7) and len(set(cards)) > 5
    assert len(json.loads(made({"id": "CartPole-v1", "options": {}}).reset(problem(), seed=0))) == 4


def test_actions_as_json_and_text(gymnasium):
    from gymnasium import spaces

    from megatron_rft.environments.games import read_action

    assert read_action(spaces.Box(-1, 1, (2,)), "[0.5, -1]").tolist() == [0.5, -1.0]
    assert read_action(spaces.Text(9), " north \n") == "north"
    for space, text in ((spaces.Box(-1, 1, (2,)), "[0.5, 2]"), (spaces.MultiDiscrete([2, 3]), "[1, 3]")):
        with pytest.raises(ValueError):
            read_action(space, text)


def test_a_world_that_is_not_there_is_named_before_the_first_turn(gymnasium, tmp_path):
    processes = EnvironmentProcesses({"kind": "gymnasium", "id": "Lake-v1", "options": {}}, 1, 20.0, tmp_path / "log")
    with pytest.raises(ConfigError, match=r"environment: environment.id: Lake-v1 cannot be made: .*doesn't exist"):
        processes.new().ask("reset", prompt={}, seed=0)


def test_a_library_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"environment.kind: textarena is not installed: pip install .*\[games\]"):
        schemas(LibraryGame(kind="textarena", id="GuessTheNumber-v0-raw"))


def test_a_game_of_textarena():
    pytest.importorskip("textarena", reason=f"textarena {INSTALL}")
    game = made({"id": "GuessTheNumber-v0-raw", "options": {"max_number": 7}}, TextArenaEnvironment)
    assert "between 1 and 7" in game.reset(problem(), seed=0)
    low, high, guess = 1, 7, None
    for _ in range(3):
        guess = (low + high) // 2
        turn = game.step(f"I bisect: [{guess}]")
        if turn.done:
            break
        assert turn.text in ("The target number is higher.", "The target number is lower.")
        low, high = (guess + 1, high) if "higher" in turn.text else (low, guess - 1)
    score = game.score()
    assert turn.done and score.reward == 1.0 and "correct" in score.reason
    game.reset(problem(), seed=5)
    assert game.step(f"[{guess}]").done, "the same problem is the same game"
    game.reset(problem(), seed=5)
    assert game.score().reward == 0.0, "a game that is not finished"
