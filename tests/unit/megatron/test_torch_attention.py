"""The torch spec's attention: buckets of packed sequences against one sequence at a time, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from megatron_rft.megatron import torch_attention


def attention():
    module = torch_attention.TorchAttention.__new__(torch_attention.TorchAttention)
    torch.nn.Module.__init__(module)
    module.softmax_scale = None
    return module


def one_by_one(q, k, v, lens):
    outs = []
    for parts in zip(*(x.split(lens) for x in (q, k, v)), strict=True):
        one = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in parts), is_causal=True, enable_gqa=True)
        outs.append(one.transpose(0, 1).flatten(1))
    return torch.cat(outs)


@pytest.mark.parametrize("lens", [[5], [4, 1, 3], [1] * 7, [2, 30, 29, 3, 1]])
def test_packed_attention_equals_one_sequence_at_a_time(lens):
    total, generator = sum(lens), torch.Generator().manual_seed(0)
    shapes = [(total, 4, 8), (total, 2, 8), (total, 2, 8)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes)
    ends = tuple(torch.tensor([0, *lens]).cumsum(0).tolist())
    weights = torch.randn(total, 32, generator=generator, dtype=torch.float64)
    found, expected = attention().attend_packed(q, k, v, ends), one_by_one(q, k, v, lens)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (found, expected)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_buckets_hold_similar_lengths_and_every_token_once():
    """Lengths 8 2 7 0 2: one bucket of 8 and 7, one of the 2s; all token positions differ."""
    cells, place = torch_attention.buckets((0, 8, 10, 17, 17, 19), torch.device("cpu"))
    assert [tuple(c.shape) for c in cells] == [(2, 8), (2, 2)]
    assert cells[0][1].tolist() == [10, 11, 12, 13, 14, 15, 16, 16] or cells[0][0][-1] == 16
    assert len(set(place.tolist())) == 19
    assert torch.equal(torch.cat([c.flatten() for c in cells])[place], torch.arange(19))


def test_the_context_mask_is_causal_within_a_sequence():
    """Two sequences of 4 over 2 ranks. Rank 0 holds positions 0 and 3 of each; keys come rank by rank."""
    mask = torch_attention.context_mask((0, 4, 8), 2, 0, torch.device("cpu"), torch.float32)
    #       keys: 0 3 | 0 3 || 1 2 | 1 2
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 1, 1],
    ]
