"""vLLM with an actor's weights against transformers with the same weights, exported."""

from pathlib import Path

import pytest

from megatron_rft.config.vllm import unusable
from tests.parity.launch import torchrun


@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
def test_equal_to_transformers_after_every_sync(tmp_path):
    """Three families, tied and untied, from actors of TP 1, TP 2 and PP 2, five syncs each; fp32. One of them also on
    an engine of two workers."""
    output = torchrun(Path(__file__).with_name("vllm_cases.py"), 2, tmp_path, timeout=400)
    cases = [line.split("\t")[1:] for line in output.splitlines() if line.startswith("CASE\t")]
    assert len(cases) == (3 * 2 + 1) * 3 * 5, output[-3000:]
    assert not [case for case in cases if case[1] != "0"], "greedy tokens differ"
    assert not [case for case in cases if not float(case[2]) < 1e-4], "log-probs differ"
