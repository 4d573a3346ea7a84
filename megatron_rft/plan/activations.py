"""Bytes of activations on a rank, from the tensors that each layer keeps for its backward pass. Plain arithmetic.

By torch's spec (megatron/spec.py) on a GPU: fused norms keep their input, torch's rotary embedding the cosines and
sines, flash attention no matrix; there is no dropout. `tests/integration/test_rehearse.py` compares it with the code.
With Transformer Engine the layers keep less, from its sources: no copies of cosines and sines and of queries. What the
allocator leaves between blocks is not counted.
"""

from typing import Any

from megatron_rft.config.sections import Batching, Megatron
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.parameters import Sizes

PADDING = 1.15  # of packed sequences in buckets of about equal length (megatron/spec.py), on average


def activations(
    element: int,
    megatron: Megatron,
    batching: Batching,
    second: bool,
    keys: float | None,
    s: Sizes,
    layout: Layout,
    stage: int,
) -> int:
    """Of the micro-batches under way, and of what is largest beside them: the head, or one layer's backward pass.
    `element`: bytes of a number. `second`: the loss compares with a second distribution, which has an output matrix,
    hidden states and blocks of logits too. `keys`: of shared prompts (shared_prompts.Group)."""
    tokens = batching.micro_batch_tokens / layout.cp
    sequence = layout.tp if megatron.sequence_parallel else 1
    kinds = set(s.mixture)
    largest = max(kept(s, layout, sequence, mixture, megatron.recompute_granularity, keys) for mixture in kinds)
    beside = max(_backward(s, layout, sequence, mixture) for mixture in kinds)
    layers = len(s.mixture) // (layout.pp * (layout.vpp or 1)) * under_way(layout, stage)
    if megatron.recompute_granularity == "full":
        beside, largest = beside + largest, s.hidden / sequence
    mask = tokens * layout.cp if layout.cp > 1 else 0  # of a micro-batch, for each token; all layers have the same one
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
    """Micro-batches (of one virtual stage each) between their forward and their backward passes, at most."""
    if layout.vpp is None:
        return layout.pp - stage
    return 2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1


def kept(
    s: Sizes, layout: Layout, sequence: int, mixture: bool, recompute: str | None, keys: float | None = None
) -> float:
    """Elements per token of a layer. `sequence`: ranks that share a sequence outside of the matrices (TP or 1)."""
    feed_forward = _mixture(s, layout, sequence) if mixture else 3 * s.ffn / layout.tp
    return 4 * s.hidden / sequence + _attention(s, layout, recompute, keys) + feed_forward


def _attention(s: Sizes, layout: Layout, recompute: str | None, keys: float | None) -> float:
    tp = layout.tp
    projected = s.q + 2 * max(s.kv, tp * s.head_dim)  # a head of keys and values on each rank at least
    copied = s.q if s.qk_norm and s.kv_heads > tp else 0  # of the queries, where groups lie between them
    attended = s.q + s.kv  # rotated; with selective recompute that is what attention starts from again
    if recompute != "selective":
        attended = PADDING * (2 * s.q + 2 * s.kv)  # in buckets, and the result
        if keys is not None:  # no buckets: keys and values of a shared prompt once for each response
            attended = 2 * s.q + 2 * s.kv * keys
        if layout.cp > 1:  # keys and values of all contexts, for each head
            attended = 2 * s.q + 2 * s.q * layout.cp
        projected = projected if s.qk_norm else 0
    return (projected + copied + attended + s.q) / tp + 4 * s.head_dim


def _mixture(s: Sizes, layout: Layout, sequence: int) -> float:
    """The expert's input, [gate | up], the activation before and after its weight; and the router's fp32 scores."""
    copies = s.experts_per_token * layout.etp / sequence  # of a token, on this rank
    return copies * (s.hidden + 4 * s.expert_ffn / layout.etp) + 6 * s.experts / sequence


def _backward(s: Sizes, layout: Layout, sequence: int, mixture: bool) -> float:
    """Elements per token of one layer's gradients at their most: around the feed-forward's activation."""
    if not mixture:
        return 2 * s.hidden + 5 * s.ffn / layout.tp
    copies = s.experts_per_token * layout.etp / sequence
    return copies * (3 * s.hidden + s.expert_ffn / layout.etp)


def compares(algorithm: Any) -> bool:
    """Whether the losses of a section `algorithm` look at a second distribution."""
    exact = getattr(algorithm, "kl_estimator", None) == "exact" and getattr(algorithm, "kl_coefficient", 0) > 0
    return exact or any(getattr(algorithm, name, False) for name in ("uses_feedback", "compares_distributions"))
