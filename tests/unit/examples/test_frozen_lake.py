"""gymnasium's FrozenLake as an environment: what the policy sees, and when it has crossed."""

import pytest

from megatron_rft.environments import Prompt
from megatron_rft.environments.worker import maker

pytest.importorskip("gymnasium", reason="gymnasium is not installed (tools/setup_env.sh cpu,test)")
LAKE = "examples/agents/frozen_lake.py:FrozenLake"


def begun():
    lake = maker(kind="own", episode=LAKE)()
    return lake, lake.reset(Prompt(3, (), "", "", {}), seed=0)


def test_a_walk_over_the_lake():
    lake, seen = begun()
    assert seen.splitlines()[2] == "[S]FFF" and "That is no move" in lake.step("I go to the left, 7").text
    turns = [lake.step(f"2 is right, 1 is down. I take {move}") for move in (2, 2, 1, 1, 1, 2)]
    assert "SF[F]F" in turns[1].text and not any(turn.done for turn in turns[:-1])
    assert turns[-1].done and lake.score() == 1.0


def test_a_hole():
    lake, _ = begun()
    assert [lake.step(str(move)).done for move in (2, 1)] == [False, True] and lake.score() == 0.0
