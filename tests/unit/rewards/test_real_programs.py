"""HumanEval and MBPP: reference solutions get the full reward, and mutated ones exactly that of their fault."""

import ast
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rft.data.adapters import ADAPTERS
from megatron_rft.data.fields import Fields
from megatron_rft.records import Prompt
from megatron_rft.rewards.code import CodeReward
from tests.unit.rewards.test_sandbox import code_reward

FOLDER = Path(os.environ.get("MEGATRON_RFT_DATA", Path(__file__).parents[4] / "shared" / "data"))
pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason=f"no benchmark rows in {FOLDER} (MEGATRON_RFT_DATA)"),
    pytest.mark.filterwarnings("ignore:invalid escape sequence"),
]
Problem = tuple[dict, str, str]  # tests, reference solution, name of the function


def rows(name: str) -> list[dict]:
    path = FOLDER / f"{name}.jsonl"
    if not path.is_file():
        pytest.skip(f"no {path}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def humaneval() -> list[Problem]:
    problems = []
    for row in rows("humaneval"):
        name = row["entry_point"]
        # The prompt's own helpers are the tests' too: find_zero is tested by its prompt's poly.
        setup = f"{row['prompt']}    pass\n"
        tests = {"kind": "assert", "code": f"{row['test']}\ncheck({name})", "setup": setup, "names": [name]}
        problems.append((tests, row["prompt"] + row["canonical_solution"], name))
    return problems


def mbpp() -> list[Problem]:
    problems = []
    for row in rows("mbpp"):
        code = "\n".join(row["test_list"])
        used = {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}
        defined = [node.name for node in ast.parse(row["code"]).body if hasattr(node, "name") and node.name in used]
        tests = {"kind": "assert", "code": code, "setup": row["test_setup_code"], "names": defined}
        problems.append((tests, row["code"], defined[-1]))
    return problems


def apps() -> list[Problem]:
    problems = []
    for row in rows("apps_train_sample"):
        tests = json.loads(row["input_output"])
        solutions = json.loads(row["solutions"])
        if "fn_name" not in tests:
            tests = {"kind": "stdin", "inputs": tests["inputs"], "outputs": tests["outputs"]}
            problems.append((tests, solutions[0], ""))
    return problems


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    reward = code_reward(timeout_s=10.0, workers=2)
    yield reward
    reward.close()


def grade(reward: CodeReward, problems: list[Problem], *, after: str = "") -> list:
    prompts = [Prompt(index, (1,), "", json.dumps(tests)) for index, (tests, _, _) in enumerate(problems)]
    return reward(prompts, [f"{source}\n{after.replace('NAME', name)}" for _, source, name in problems])


@pytest.mark.parametrize("source", [humaneval, mbpp, apps])
def test_reference_solutions_pass_everything(source, reward):
    scores = grade(reward, source())
    assert [(i, score) for i, score in enumerate(scores) if score.reward != 1.0 or score.error] == []
    assert all(score.details["tests"] for score in scores)


def adapted(name: str, adapter: str) -> list[tuple[dict, str]]:
    path = FOLDER / f"{name}.jsonl"
    found = [ADAPTERS[adapter](Fields(row, f"row {k}", path)) for k, row in enumerate(rows(name), start=1)]
    return [(row["tests"], row["solution"]) for row in found if "unusable" not in row]


def test_canonical_solutions_pass_with_the_default_limits():
    reward = code_reward(workers=2)
    problems = adapted("humaneval", "humaneval")
    prompts = [Prompt(index, (1,), "", json.dumps(tests)) for index, (tests, _) in enumerate(problems)]
    scores = reward(prompts, [solution for _, solution in problems])
    reward.close()
    assert [(i, score) for i, score in enumerate(scores) if score.reward != 1.0] == []


FAULTS = {
    "def (": -1.0,
    "def NAME(*args, **kwargs): raise ValueError('mutated')": -0.6,
    "import os\ndef NAME(*args, **kwargs): os._exit(0)": -0.6,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("source", [humaneval, mbpp])
def test_a_fault_has_its_tier(source, fault, reward):
    scores = grade(reward, source()[::8], after=fault)
    assert {score.reward for score in scores} == {FAULTS[fault]}


def test_wrong_from_the_second_call_on_has_its_share(reward):
    """Rows of MBPP whose tests are three single calls: the first is right."""
    problems = [
        (tests, source, name)
        for tests, source, name in mbpp()
        if tests["code"].count(f"{name}(") == 3 == len(tests["code"].splitlines())
        and source.count(f"{name}(") == 1  # it does not call itself
    ]
    after = "right, calls = NAME, []\ndef NAME(*args):\n    calls.append(1)\n"
    after += "    return right(*args) if len(calls) < 2 else ..."
    scores = grade(reward, problems[:60], after=after)
    assert len(scores) > 40
    assert {round(score.reward, 12) for score in scores} == {round(-0.3 + 1.3 / 3, 12)}


def test_an_endless_loop_has_the_tier_of_runtime_errors():
    reward = code_reward(timeout_s=1.0, workers=2)
    scores = grade(reward, mbpp()[:4], after="def NAME(*args):\n    while True: pass")
    reward.close()
    assert [(score.reward, score.details["tier"]) for score in scores] == [(-0.6, "time-out")] * 4
