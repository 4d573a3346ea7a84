"""The custom norm against autograd of its definition."""

import torch
import torch.nn.functional as F

from megatron_rft.megatron.cpu.layers import Normalise


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
