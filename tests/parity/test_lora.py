"""LoRA equals PEFT on the transformers twin in every layout: loss, gradients, the gradient's norm, zero and merged."""

import json
from pathlib import Path

import pytest

from tests.parity.launch import run_ranks

CASES = {1: 31, 2: 23, 4: 3}  # ranks -> cases that lora_cases.py runs: a case left out shows too
MATRICES = {"qwen3": 56, "qwen2": 56, "llama": 24, "mistral": 56, "gemma3_text": 56, "olmo2": 56, "olmo3": 56}
MATRICES |= {"qwen3_moe": 32, "glm4_moe": 32, "minimax_m2": 32, "gpt_oss": 32}  # of attention alone
MATRICES |= {"qwen3_5": 40, "qwen3_5_moe": 16, "qwen3_next": 16}  # two of four layers have attention
MATRICES |= {
    "qwen2_5_vl": 56,
    "qwen3_vl": 112,
    "qwen2_5_vl vision": 66,
    "qwen3_vl vision": 36,
    "qwen3_vl_moe vision": 100,
}
DELTA_NETS = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # transformers computes them in fp32


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=[pytest.mark.slow] * (n == 2)) for n in sorted(CASES)])
def test_equal_to_peft(ranks, tmp_path):
    output = run_ranks(Path(__file__).with_name("lora_cases.py"), ranks, tmp_path)
    found = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
    assert len(found) == CASES[ranks], output[-3000:]
    for case in found:
        # The twin is in float64: in fp32 it adds rounding of its own. The worst gradient seen was 9e-6 (qwen2, TP 2).
        # A tower rotates in fp32 in any precision, and eight narrow layers lie behind it: 1.2e-5 (qwen3_vl, DP 2).
        bound = 1e-4 if case["family"] in DELTA_NETS else 2e-5 if "vision" in case["family"] else 1e-5
        assert max(case["loss"], case["gradient"], case["norm"]) < bound, case
        assert case["zero_is_base"] and case["merged"] < 1e-4, case
        assert case["matrices"] == MATRICES[case["family"]], case
