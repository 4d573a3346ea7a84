"""The custom parts of layers against autograd of their definitions."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.fusions import fused_bias_swiglu
from megatron.core.models.common.embeddings import rope_utils

from megatron_rft.megatron.cpu.layers import Normalise, Rotate, swiglu, swiglu_back


def test_normalise_and_its_gradients():
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(Normalise.apply(x, weight, 1e-6), F.rms_norm(x, (5,), weight, 1e-6))
    assert torch.autograd.gradcheck(lambda x, weight: Normalise.apply(x, weight, 1e-2), (x, weight))


def test_normalise_computes_bf16_in_fp32():
    """Result and gradients equal those of fp32, rounded once."""
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(shape, generator=generator).bfloat16() for shape in ((6, 5), (5,), (6, 5)))
    found, expected = [], []
    for results, dtype in ((found, torch.bfloat16), (expected, torch.float32)):
        inputs = [t.to(dtype).requires_grad_() for t in (x, weight)]
        out = Normalise.apply(*inputs, 1e-6)
        results += [out, *torch.autograd.grad(out, inputs, grad.to(dtype))]
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_swiglu_and_its_gradient(dtype):
    gate_up = torch.randn(5, 8, dtype=torch.float64).to(dtype).requires_grad_()
    grad = torch.randn(5, 4, dtype=torch.float64)  # of another precision, as a router's weights make it
    gate, up = gate_up.double().chunk(2, -1)
    (F.silu(gate) * up).backward(grad)
    close = dict(atol=0.05, rtol=0.02) if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(swiglu(gate_up.detach()).double(), (F.silu(gate) * up).detach(), **close)
    torch.testing.assert_close(swiglu_back(grad, gate_up.detach()), gate_up.grad.double(), **close)


@pytest.mark.parametrize("rotated", [6, 4])
def test_rotate_and_its_gradient(rotated):
    """Each pair (x_i, x_{i + n}) turns by its angle: a complex product. Entries behind the pairs stay."""
    t = torch.randn(7, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    angles = torch.rand(7, 1, 1, rotated // 2, dtype=torch.float64)
    first, second = t[..., : rotated // 2], t[..., rotated // 2 : rotated]
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag, t[..., rotated:]], -1)
    both = torch.cat([angles, angles], -1)
    assert torch.autograd.gradcheck(lambda x: Rotate.apply(x, both.cos(), both.sin()), (t,))
    torch.testing.assert_close(Rotate.apply(t, both.cos(), both.sin()), expected)


def test_megatron_core_computes_with_them():
    assert fused_bias_swiglu.swiglu is swiglu and fused_bias_swiglu.swiglu_back is swiglu_back
    t, angles = torch.randn(3, 1, 2, 4), torch.rand(3, 1, 1, 4)
    found = rope_utils._apply_rotary_pos_emb_bshd(t, angles, mscale=2.0)
    torch.testing.assert_close(found, 2 * Rotate.apply(t, angles.cos(), angles.sin()))
