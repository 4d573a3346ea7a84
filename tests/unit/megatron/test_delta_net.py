"""The chunks of the delta rule against its recurrence, token by token, with gradients."""

import pytest
import torch
import torch.nn.functional as F

from megatron_rft.megatron.delta_net import CHUNK, EPSILON, delta_rule


def recurrence(q, k, v, g, beta):
    """The equations of the file's docstring."""
    q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPSILON) for x in (q, k))
    state, outs = torch.zeros(*q.shape[:1], q.shape[2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state
        read = torch.einsum("nhkv,nhk->nhv", state, k[:, t])
        written = beta[:, t, :, None] * (v[:, t] - read)
        state = state + k[:, t, :, :, None] * written[:, :, None]
        outs.append(torch.einsum("nhkv,nhk->nhv", state, q[:, t]) * q.shape[3] ** -0.5)
    return torch.stack(outs, 1)


@pytest.mark.parametrize("length", [1, 5, CHUNK, CHUNK + 1, 150])
def test_chunks_are_the_recurrence(length):
    generator = torch.Generator().manual_seed(length)
    inputs = [torch.randn(2, length, 3, size, generator=generator, requires_grad=True) for size in (4, 4, 5)]
    rates = [torch.randn(2, length, 3, generator=generator, requires_grad=True) for _ in range(2)]
    weight = torch.randn(2, length, 3, 5, generator=generator)
    outs, gradients = [], []
    for rule in (delta_rule, recurrence):
        out = rule(*inputs, -F.softplus(rates[0]), rates[1].sigmoid())
        outs.append(out)
        gradients.append(torch.autograd.grad((out * weight).sum(), [*inputs, *rates]))
    torch.testing.assert_close(outs[0], outs[1], atol=2e-5, rtol=1e-4)
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
