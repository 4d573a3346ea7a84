"""A run with different verifiers per row: programs in the sandbox, and mathematics with a shaping term."""

import json

import psutil
import pytest

from megatron_rft.commands.doctor import told
from megatron_rft.rewards.code import container
from tests.integration import tiny

REWARD = {
    "kind": "by_row",
    "field": "task",
    "kinds": {
        "maths": {
            "kind": "sum",
            "parts": [{"kind": "math"}, {"kind": "format", "tags": ["a"], "weight": 0.5, "shaping": True}],
        },
        "program": {"kind": "code", "timeout_s": 5.0},
    },
}


@pytest.mark.skipif(told(container).startswith("none: "), reason="no container for programs works here")
def test_a_run_with_two_kinds_of_rows(tmp_path):
    recipe = tiny.write_recipe(tmp_path, reward=REWARD, run={"steps": 2, "seed": 3})
    for name in ("train", "test"):
        path = tmp_path / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, row in enumerate(rows):
            # The program "3" is right: nothing is to be printed, and a number alone prints nothing.
            tests = {"kind": "stdin", "inputs": [""], "outputs": [""]}
            row |= {"task": ("maths", "program")[number % 2], "tests": tests}
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, output = tiny.train(recipe)
    assert status == 0, output
    assert "programs run in" in output and "reward: by_row + sum + math + format + code" in output
    steps = [line for line in tiny.metrics(tmp_path / "run") if "reward/mean" in line]
    assert len(steps) == 2 and all(line["reward/grader_errors"] == 0 for line in steps)
    lines = (tmp_path / "run/evaluation/test_step_000002/test.jsonl").read_text().splitlines()
    programs = [each for each in map(json.loads, lines) if each["problem"] % 2]
    assert {each["reward"] for each in programs} <= {-1.0, 1.0} and {each["correct"] for each in programs} <= {0.0, 1.0}
    assert tiny.wait_until(lambda: not processes_about(str(tmp_path)))


def processes_about(words: str) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["cmdline"]) if words in " ".join(each.info["cmdline"] or [])]
