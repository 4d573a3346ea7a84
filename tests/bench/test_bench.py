"""Each script of tools/bench runs at its smallest size and prints its table.

A script says that size itself: SMALLEST, its arguments, where {model} is a folder with an arithmetic model of random
weights, {rows} one with problems of mathematics and {out} one that is not there yet. A script without it fails here.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.quickstart import arithmetic
from megatron_rft.plan.vllm import unusable
from tests.fork_server import ENVIRONMENT, Forked

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path for path in (ROOT / "tools/bench").glob("*.py") if "__main__" in path.read_text())
RULE = re.compile(r"\|( *-+ *\|)+")  # the line below the names of a table's columns


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    arithmetic.write_model_folder(folder, **shape)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(arithmetic.qwen3_config(**shape)).save_pretrained(folder)
    return folder


def smallest(script: Path) -> str:
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SMALLEST":
            return ast.literal_eval(node.value)
    pytest.fail(f"{script.name} has no SMALLEST, the arguments of its smallest size")


def tables(output: str) -> list[list[list[str]]]:
    """The cells of each table's rows, without the headings."""
    lines, found = output.splitlines(), []
    for number, line in enumerate(lines):
        if RULE.fullmatch(line.strip()):
            rows = [lines[number - 1]]
            for each in lines[number + 1 :]:
                if not each.startswith("|"):
                    break
                rows.append(each)
            cells = [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in rows]
            assert len({len(row) for row in cells}) == 1, f"rows of unequal length:\n{output}"
            found.append(cells[1:])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_prints_its_table(script, model, tmp_path):
    text = script.read_text()
    if "VLLMEngine(" in text and not ("--engine" in text or "unusable()" in text) and unusable():
        pytest.skip(unusable())
    rows = [{"problem": "Add.", "answer": answer} for answer in ("\\frac{1}{2}", "(1, 2)", "12")]
    (tmp_path / "math500.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = smallest(script).format(model=model, rows=tmp_path, out=tmp_path / "out").split()
    start = subprocess.Popen if script.stem == "compare" else Forked  # a fork has this checkout's modules
    process = start(
        [sys.executable, str(script), *words],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,  # apart: warnings come in the middle of tables
        text=True,
    )
    output, errors = process.communicate(timeout=900)
    assert process.returncode == 0, output[-3000:] + errors[-3000:]
    found = tables(output)
    assert found and all(found), f"no table:\n{output[-3000:]}"
    for row in (row for table in found for row in table):
        assert any(re.search(r"\d", cell) for cell in row[1:]) or "left out" in row[1], row


def test_there_are_scripts():
    assert {"grpo_vs_trl", "rollout_vllm", "wire"} <= {script.stem for script in SCRIPTS}
