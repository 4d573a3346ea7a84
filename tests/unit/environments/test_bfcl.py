"""BFCL's own tasks of several turns: the references pass, and each call is needed."""

import json
from copy import deepcopy
from pathlib import Path

import pytest

from examples.agents import make_bfcl
from megatron_rft.data.rows import load_rows
from megatron_rft.environments.bfcl import BfclEnvironment
from megatron_rft.records import Prompt, Score

package = pytest.importorskip("bfcl_eval", reason="bfcl-eval is not installed (tools/setup_env.sh cpu,bfcl)")
DATA = Path(package.__path__[0]) / "data"


@pytest.fixture(scope="module")
def modules():
    return BfclEnvironment.shared()["modules"]


def rows(category: str) -> list[dict]:
    return load_rows(DATA / f"BFCL_v4_multi_turn_{category}.json", adapter="bfcl_multi_turn")


def begun(modules, row: dict) -> BfclEnvironment:
    environment = BfclEnvironment(modules)
    environment.reset(Prompt(0, (), "", row["answer"], row), seed=0)
    return environment


def played(modules, row: dict, reference: list[list[str]]) -> Score:
    """The score of an episode with one call in each turn, and a text at the end of each of the user's."""
    environment = begun(modules, row)
    for calls in reference:
        for call in map(environment.right.reference, calls):
            written = json.dumps({"name": call.name, "arguments": call.arguments})
            assert not environment.step(f"<tool_call>\n{written}\n</tool_call>").done
        if environment.step("Done.").done:
            break
    return environment.score()


@pytest.mark.parametrize("category", ["base", "miss_param", "long_context"])
def test_the_references_pass(modules, category):
    scores = [played(modules, row, json.loads(row["answer"])) for row in rows(category)]
    assert [score.reward for score in scores] == [1.0] * 200


def test_the_example_divides_them_by_number(modules, tmp_path):
    make_bfcl.main(tmp_path)
    train, test = (load_rows(tmp_path / f"{part}.json", adapter="bfcl_multi_turn") for part in ("train", "test"))
    numbers = [{row["id"].rpartition("_")[2] for row in part} for part in (train, test)]
    assert (len(train), len(test)) == (320, 40) and not numbers[0] & numbers[1]
    for row in (*train[::40], *test[::10]):
        assert played(modules, row, json.loads(row["answer"])).reward == 1


def test_each_call_is_needed(modules):
    """BFCL's rule accepts one of them: its result, without an effect, was there in an earlier turn of the user."""
    passing, tried = [], 0
    for row in rows("base"):
        reference = json.loads(row["answer"])
        for turn, calls in enumerate(reference):
            for number, call in enumerate(calls):
                less = deepcopy(reference)
                del less[turn][number]
                score, tried = played(modules, row, less), tried + 1
                if score.reward:
                    passing.append(call)
                else:
                    assert score.reason.startswith(f"the user's turn {turn + 1}: ")
    assert tried == 1142 and passing == ["get_watchlist()"]


def test_the_prompt_and_the_turns(modules):
    row = rows("base")[0]
    assert row["question"].startswith("Move 'final_report.pdf'") and len(row["later"]) == 3
    (system,) = row["history"]
    assert '"name": "mv"' in system["content"] and '"name": "cp"' not in system["content"], "cp is excluded"
    environment = begun(modules, row)
    turn = environment.step(
        '<tool_call>{"name": "cp", "arguments": {}}</tool_call><tool_call>{"name": "ls"}</tool_call>'
    )
    unknown, listed = turn.text
    assert "there is no function cp" in unknown["content"] and "current_directory_content" in listed["content"]
    ended = environment.step("I have done nothing.")
    assert (
        ended.done
        and environment.score().reason == "the user's turn 1: GorillaFileSystem is not as after the right calls"
    )
    assert begun(modules, row).score() == Score(0.0, reason="not finished")
    assert all("unusable" in row for row in rows("miss_func"))
