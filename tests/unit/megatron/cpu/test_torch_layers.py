"""The custom elementwise layers against autograd of their definitions."""

import torch
import torch.nn.functional as F

from megatron_rft.megatron.cpu.layers import Normalise, SwiGLU, rotary


def test_swiglu_and_its_gradient():
    x = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(SwiGLU.apply(x), F.silu(gate) * up)
    assert torch.autograd.gradcheck(SwiGLU.apply, x)


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


def test_rotary_turns_each_pair_by_its_angle():
    """One head of two channels at positions 0 and 1: (1, 0) turned by 0 and by a right angle."""
    t = torch.tensor([1.0, 0.0]).expand(2, 1, 1, 2)
    freqs = torch.tensor([0.0, torch.pi / 2])[:, None, None, None].expand(2, 1, 1, 2)
    torch.testing.assert_close(rotary(t, freqs).view(2, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0]]))


def test_the_gradient_of_rotary():
    t = torch.randn(4, 1, 2, 6, dtype=torch.float64, requires_grad=True)
    freqs = torch.randn(4, 1, 1, 3, dtype=torch.float64).repeat(1, 1, 1, 2)
    assert torch.autograd.gradcheck(lambda x: rotary(x, freqs), t)
