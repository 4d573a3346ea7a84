"""Attention with shared prompts against each sequence alone: values and gradients."""

import pytest
import torch
import torch.nn.functional as F

from megatron_rft.megatron import torch_attention
from megatron_rft.megatron.cpu import layers
from megatron_rft.megatron.packing import MicroBatch, PackLayout, pack
from megatron_rft.megatron.torch_attention import attend_gathered, bottom_right, take_rows, with_shared_prompts
from megatron_rft.records import Batch

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 8
# (length of the prompt, which says which prompt it is; length of the response)
SHAPES = {
    "one group": [(5, 4), (5, 2), (5, 9)],
    "two groups and one alone": [(5, 4), (3, 6), (5, 1), (3, 7), (4, 5), (5, 12)],
    "responses of one token": [(4, 1), (4, 1), (2, 1)],
    "the last of one token": [(4, 3), (4, 1)],
    "long responses": [(2, 60), (2, 33), (2, 58), (2, 5)],
    "a long prompt": [(70, 3), (70, 2), (6, 2)],
}


def micro_batch(shapes: list[tuple[int, int]]) -> MicroBatch:
    whole = Batch.of([[7] * p for p, _ in shapes], [[9] * r for _, r in shapes])
    return pack(whole, PackLayout(share_prompts=True, total_multiple=2), CPU)


def inputs(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def sequence_by_sequence(q, k, v, micro: MicroBatch, scale=None) -> torch.Tensor:
    """The attention of each response's tokens over its prompt and itself, computed separately; 0 in padding."""
    out, batch = torch.zeros_like(q), micro.batch
    for rows, prompt in zip(micro.rows.split(batch.response_lens.tolist()), batch.prompt_lens.tolist(), strict=True):
        cells = torch.cat([torch.arange(int(rows[0]) - prompt + 1, int(rows[0]) + 1), rows[1:]])
        parts = [x[cells].transpose(0, 1) for x in (q, k, v)]
        found = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True, scale=scale)
        out = out.index_copy(0, cells, found.transpose(0, 1))
    return out


def on_the_cpu(q, k, v, micro, scale=None):
    module = torch_attention.TorchAttention.__new__(torch_attention.TorchAttention)
    torch.nn.Module.__init__(module)
    module.softmax_scale = scale
    return module.attend_shared(q, k, v, micro.packed).unflatten(1, (HEADS, SIZE))


def elsewhere(q, k, v, micro, scale=None):
    return attend_gathered(q, k, v, micro.packed, scale)


class VariableLengthAttention(torch.nn.Module):
    """Transformer Engine's documented contract for packed sequences."""

    def forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None):
        assert attn_mask_type.name == "padding_causal_bottom_right"
        ends_q, ends_k = (x.tolist() for x in (packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv))
        outs = []
        for a, b, c, d in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False):
            mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
            parts = [x[start:end].transpose(0, 1) for x, start, end in ((query, a, b), (key, c, d), (value, c, d))]
            outs.append(F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True).transpose(0, 1))
        return torch.cat(outs).flatten(1)


def in_one_call(q, k, v, micro, scale=None):
    attention = with_shared_prompts(VariableLengthAttention)()
    out = attention(q, k, v, None, attn_mask_type=None, attention_bias=None, packed_seq_params=micro.packed)
    return out.unflatten(1, (HEADS, SIZE))


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("attend", [on_the_cpu, elsewhere, in_one_call])
def test_equals_each_sequence_by_itself(attend, shapes):
    micro = micro_batch(shapes)
    q, k, v = inputs(micro.token_ids.numel())
    real = torch.zeros(len(q), dtype=torch.float64)
    real[: len(set(shapes)) and int(micro.rows.max()) + 1] = 1
    weights = (
        torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * real[:, None, None]
    )
    found, expected = attend(q, k, v, micro), sequence_by_sequence(q, k, v, micro)
    torch.testing.assert_close(found * real[:, None, None], expected * real[:, None, None])
    gradients = [torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (found, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_bias_of_a_gpu_is_the_mask_of_a_cpu():
    mask, bias = (bottom_right(3, 5, torch.device(kind)) for kind in ("cpu", "cuda"))
    assert mask.tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]
    q, k, v = (torch.randn(1, heads, length, SIZE) for heads, length in ((HEADS, 3), (KV_HEADS, 5), (KV_HEADS, 5)))
    found = [F.scaled_dot_product_attention(q, k, v, attn_mask=each, enable_gqa=True) for each in (mask, bias)]
    torch.testing.assert_close(*found)


def test_the_scale_is_the_one_that_was_asked_for():
    micro = micro_batch(SHAPES["one group"])
    parts = inputs(micro.token_ids.numel())
    for attend in (on_the_cpu, elsewhere):
        found, expected = (f(*parts, micro, scale=0.1) for f in (attend, sequence_by_sequence))
        length = int(micro.rows.max()) + 1
        torch.testing.assert_close(found[:length], expected[:length])


def test_bf16_is_as_near_as_one_call_of_the_kernel():
    micro = micro_batch(SHAPES["a long prompt"])
    parts = [x.detach() for x in inputs(micro.token_ids.numel())]
    exact, length = sequence_by_sequence(*parts, micro), int(micro.rows.max()) + 1
    rounded = [x.bfloat16() for x in parts]
    ours, one_call = (f(*rounded, micro).double()[:length] - exact[:length] for f in (on_the_cpu, sequence_by_sequence))
    assert ours.abs().max() < 1.5 * one_call.abs().max() + 1e-3


@pytest.mark.parametrize("few_keys", [0, 384], ids=["in bf16", "in fp32"])
def test_bf16_gradients_are_those_of_double_precision_to_rounding(few_keys, monkeypatch):
    monkeypatch.setattr(layers, "FEW_KEYS", few_keys)
    micro = micro_batch(SHAPES["two groups and one alone"])
    length = int(micro.rows.max()) + 1
    parts = [x.detach().bfloat16().requires_grad_() for x in inputs(micro.token_ids.numel())]
    exact = [x.detach().double().requires_grad_() for x in parts]
    found = torch.autograd.grad(on_the_cpu(*parts, micro)[:length].sum(), parts)
    expected = torch.autograd.grad(sequence_by_sequence(*exact, micro)[:length].sum(), exact)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - theirs).norm() < 0.02 * theirs.norm()


def test_rows_that_are_taken_twice_get_both_gradients():
    values = torch.arange(6.0).view(3, 2).requires_grad_()
    take_rows(values, torch.tensor([1, 1, 2])).sum().backward()
    assert values.grad.tolist() == [[0, 0], [2, 2], [1, 1]]
