"""Logits, values and exported tensors of every family in every layout, against transformers in fp32."""

from pathlib import Path

import pytest

from tests.parity.hf_cases import LAYOUTS, cases
from tests.parity.launch import run_ranks


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_equal_to_transformers(ranks, tmp_path):
    output = run_ranks(Path(__file__).with_name("hf_cases.py"), ranks, tmp_path)
    compared = [line.split("\t")[1:] for line in output.splitlines() if line.startswith("CASE\t")]
    assert [case[:2] for case in compared] == [[family, name] for family, name, _ in cases(ranks)], output[-3000:]
    far = [case for case in compared if not float(case[2]) < 1e-4]
    assert not far, f"logits or values differ from transformers: {far}"
    inexact = [case for case in compared if case[3] != "0"]
    assert not inexact, f"exported tensors are not those that were loaded: {inexact}"
