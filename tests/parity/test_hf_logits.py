"""Logits, values and exported tensors of every family in every layout, against transformers in fp32."""

from pathlib import Path

import pytest

from tests.parity.launch import run_ranks

CASES = {1: 5, 2: 22, 4: 16}  # ranks -> cases that hf_cases.py runs: a case left out shows too


@pytest.mark.parametrize("ranks", sorted(CASES))
def test_equal_to_transformers(ranks, tmp_path):
    output = run_ranks(Path(__file__).with_name("hf_cases.py"), ranks, tmp_path)
    cases = [line.split("\t")[1:] for line in output.splitlines() if line.startswith("CASE\t")]
    assert len(cases) == CASES[ranks], output[-3000:]
    far = [case for case in cases if not float(case[2]) < 1e-4]
    assert not far, f"logits or values differ from transformers: {far}"
    inexact = [case for case in cases if case[3] != "0"]
    assert not inexact, f"exported tensors are not those that were loaded: {inexact}"
