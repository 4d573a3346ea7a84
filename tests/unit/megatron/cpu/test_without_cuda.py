"""megatron-core's view of torch on a host without CUDA, and its optimizer there."""

import pytest
import torch
from megatron.core import optimizer
from megatron.core.transformer import transformer_layer

from megatron_rft.megatron import cpu
from megatron_rft.megatron.cpu import optimizer as host_optimizer
from megatron_rft.megatron.cpu.optimizer import FusedAdam

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="this host has CUDA")


def test_megatron_core_means_the_cpu():
    view = transformer_layer.torch
    assert view.cuda.current_device() == torch.device("cpu")
    assert view.empty(2, device="cuda", pin_memory=True).device.type == "cpu"
    assert view.nn is torch.nn and view.Tensor is torch.Tensor


def test_torch_itself_is_left_alone():
    assert transformer_layer.torch is not torch
    with torch.device("meta"):
        assert torch.empty(2).is_meta
    with pytest.raises((RuntimeError, AssertionError)):
        torch.empty(2, device="cuda")


def test_a_second_install_changes_nothing():
    before = transformer_layer.torch
    cpu.install()
    assert transformer_layer.torch is before


def test_adam_counts_steps_in_the_group_and_moves_like_torchs():
    assert optimizer.Adam is FusedAdam
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    options = dict(lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    steps = FusedAdam([ours], **options), torch.optim.AdamW([theirs], **options)
    for _ in range(3):
        gradient = torch.randn(3)
        for parameter, stepping in zip((ours, theirs), steps, strict=True):
            parameter.grad = gradient.clone()
            stepping.step()
    assert torch.equal(ours, theirs)
    assert steps[0].param_groups[0]["step"] == 3 and set(steps[0].state[ours]) == {"exp_avg", "exp_avg_sq"}


def test_a_routers_missing_name_is_mended_where_cuda_is_too(monkeypatch):
    from megatron.core.transformer.moe import moe_utils

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(moe_utils, "te_general_gemm")
    cpu.install.__wrapped__()
    assert moe_utils.te_general_gemm is None


def test_the_counts_of_steps_are_where_the_parameters_are(monkeypatch):
    """torch's kernel for a GPU refuses counts on the host."""
    weight, seen = torch.nn.Parameter(torch.zeros(3, device="meta")), []
    weight.grad = torch.zeros_like(weight)
    monkeypatch.setattr(host_optimizer, "adam", lambda *lists, **_: seen.extend(lists[-1]))
    FusedAdam([weight]).step()
    assert [count.device for count in seen] == [weight.device]
