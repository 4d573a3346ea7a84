"""Which of megatron-core's overlaps and fusions are on where the recipe does not say."""

from megatron_rft.config import Megatron
from megatron_rft.config.gpu_defaults import fusions, overlaps, plan_line


def test_what_is_given_decides_and_the_gather_needs_the_reduction():
    reduce, gather = "overlap_grad_reduce", "overlap_param_gather"
    assert overlaps(Megatron(), True) == {reduce: True, gather: True}
    assert overlaps(Megatron(), False) == {reduce: True, gather: False}
    assert overlaps(Megatron(overlap_grad_reduce=False), True) == {reduce: False, gather: False}
    assert overlaps(Megatron(overlap_param_gather=False), True) == {reduce: True, gather: False}


def test_fusions_follow_the_packages():
    assert fusions(True, True) == {"gradient_accumulation_fusion": True, "moe_permute_fusion": True}
    assert fusions(False, True) == {"gradient_accumulation_fusion": True, "moe_permute_fusion": False}
    assert not any(fusions(True, False).values())


def test_the_plan_names_them():
    line = plan_line(Megatron(), True, mixture=True)
    assert "overlap_param_gather, gradient_accumulation_fusion, moe_permute_fusion; recompute" in line
    assert "recompute: none" in line
    alone = Megatron(overlap_grad_reduce=False)
    none = Megatron(overlap_grad_reduce=False, gradient_accumulation_fusion=False)
    assert "on GPUs: gradient_accumulation_fusion; recompute" in plan_line(alone, True, mixture=False)
    assert "on GPUs: nothing overlaps; recompute" in plan_line(none, True, mixture=False)
