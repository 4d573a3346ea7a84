"""Computes the bytes of activations on a rank from the tensors that each layer keeps for its backward pass. No torch.

The arithmetic follows torch's spec (megatron/spec.py) on a GPU: fused norms keep their input, torch's rotary embedding
keeps cosines and sines, flash attention keeps no matrix, and there is no dropout. `tests/integration/test_rehearse.py`
compares it with the code. With Transformer Engine the layers keep less: its sources copy neither cosines and sines nor
queries. Gaps between the allocator's blocks are not counted.
"""

from megatron_rft.config.sections import Batching, Megatron
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.model_shape import ModelShape

DELTA_CHUNK = 64  # megatron/delta_net.py
PADDING = 1.15  # of packed sequences in buckets of about equal length (megatron/torch_attention.py), on average


def activations(
    element: int,
    megatron: Megatron,
    batching: Batching,
    second: bool,
    keys: float | None,
    s: ModelShape,
    layout: Layout,
    stage: int,
) -> int:
    """Return the bytes of the micro-batches under way, plus the larger of the head and one layer's backward pass.

    `element`: bytes of a number. `second`: the loss compares with a second distribution, which adds an output matrix,
    hidden states and blocks of logits. `keys`: of shared prompts (shared_prompts.Group)."""
    tokens = batching.micro_batch_tokens / layout.cp
    sequence = layout.tp if megatron.sequence_parallel else 1
    kinds = set(s.mixture)
    largest = max(kept(s, layout, sequence, mixture, megatron.recompute_granularity, keys) for mixture in kinds)
    beside = max(_backward(s, layout, sequence, mixture) for mixture in kinds)
    layers = len(s.mixture) // (layout.pp * (layout.vpp or 1)) * under_way(layout, stage)
    if megatron.recompute_granularity == "full":
        beside, largest = beside + largest, s.hidden / sequence
    mask = tokens * layout.cp if layout.cp > 1 else 0  # per token of a micro-batch; all layers share one mask
    head = 0.0
    if stage == layout.pp - 1:
        weight = -(-s.vocabulary // layout.tp) * s.hidden * element
        head = element * tokens * (5 * s.hidden + 2 * s.hidden / sequence) + weight
        head += 2.5 * (batching.logprob_block_mib << 20)
        if second:
            head += weight + element * tokens * s.hidden + 2.5 * (batching.logprob_block_mib << 20)
    held = layers * largest + mask * under_way(layout, stage)
    return round(element * tokens * held + max(element * tokens * beside, head))


def under_way(layout: Layout, stage: int) -> int:
    """Return the largest number of micro-batches (each of one virtual stage) between forward and backward pass."""
    if layout.vpp is None:
        return layout.pp - stage
    return 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1


def kept(
    s: ModelShape, layout: Layout, sequence: int, mixture: bool, recompute: str | None, keys: float | None = None
) -> float:
    """Return the elements per token that a layer keeps. `sequence`: ranks that share a sequence outside of the matrices
    (TP or 1)."""
    feed_forward = _mixture(s, layout, sequence) if mixture else (3 + s.gemma) * s.ffn / layout.tp
    attention = (1 - s.delta_share) * _attention(s, layout, recompute, keys) + s.delta_share * _delta(s, layout)
    return (4 + 2 * s.gemma) * s.hidden / sequence + attention + feed_forward


def _delta(s: ModelShape, layout: Layout) -> float:
    """Return the elements per token of a delta net in torch: its convolution's input and result and, in fp32, 7 tensors
    of a chunk's keys, of its values and of its tokens by tokens, and a state for each chunk."""
    heads, key, each, value = s.delta
    inside = 14 * (key + value + DELTA_CHUNK) + 2 * key * value / DELTA_CHUNK
    return PADDING * (2 * heads * (2 * key + each * value) + heads * each * inside) / layout.tp


def _attention(s: ModelShape, layout: Layout, recompute: str | None, keys: float | None) -> float:
    tp = layout.tp
    projected = s.q + 2 * max(s.kv, tp * s.head_dim)  # a head of keys and values on each rank at least
    copied = s.q if s.qk_norm and s.kv_heads > tp else 0  # of the queries, where groups lie between them
    attended = s.q + s.kv  # rotated; with selective recompute that is what attention starts from again
    if recompute != "selective":
        attended = PADDING * (2 * s.q + 2 * s.kv)  # padded to buckets, with the result
        if keys is not None:  # no buckets: keys and values of a shared prompt once for each response
            attended = 2 * s.q + 2 * s.kv * keys
        if layout.cp > 1:  # keys and values of all contexts, for each head
            attended = 2 * s.q + 2 * s.q * layout.cp
        projected = projected if s.qk_norm else 0
    return (projected + copied + attended + s.q) / tp + 4 * s.head_dim


def _mixture(s: ModelShape, layout: Layout, sequence: int) -> float:
    """Return the elements per token of a layer of experts: their input, [gate | up], the activation before and after
    the router's weight, and the router's fp32 scores."""
    copies = s.experts_per_token * layout.etp / sequence  # of a token, on this rank
    return copies * (s.hidden + 4 * s.expert_ffn / layout.etp) + 6 * s.experts / sequence


def _backward(s: ModelShape, layout: Layout, sequence: int, mixture: bool) -> float:
    """Return the elements per token of a layer's gradients at their peak, around the feed-forward's activation."""
    if not mixture:
        return 2 * s.hidden + 5 * s.ffn / layout.tp
    copies = s.experts_per_token * layout.etp / sequence
    return copies * (3 * s.hidden + s.expert_ffn / layout.etp)
