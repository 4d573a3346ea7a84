"""A rank: communication that overlaps with computation changes no bit of a training. Run by test_overlap.py.

The gradient's norm alone depends on the buckets: each rank squares and sums its parts of them, and other parts round to
another sum in the last bits. So a clipped training is the same bit for bit in the same buckets, and an unclipped one in
any. Megatron gathers parameters when a forward pass needs them, once after each backward pass; a forward pass while a
gradient waits for its scale must not leave a rank with old ones.
"""

from itertools import chain

import torch
import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer

from megatron_rft.config import Batching, Megatron
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import counts
from megatron_rft.records import Batch
from tests.made import made
from tests.unit.megatron.test_optimizer import CONFIG, batch_of

LOGPROBS = frozenset({"logprobs"})
APART = Megatron(overlap_grad_reduce=False, overlap_param_gather=False)
ONE_BUCKET = Megatron(overlap_grad_reduce=True, overlap_param_gather=True)
BUCKETS = Megatron(overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=500)
LOSS = made("sft").loss
CLIP = 0.1  # below every norm here
ROUNDING = 1e-6  # of a norm's fp32 sums


def build(megatron: Megatron, clip: float = 0.0) -> Actor:
    options = {"lr": 1e-2, "use_distributed_optimizer": True, "clip_grad": clip}
    actor = Actor(CONFIG, megatron, Batching(), "fp32", optimizer=options)
    actor.load(weights.random_tensors(CONFIG, seed=0))
    return actor


def step(actor: Actor, batch: Batch, waits: bool) -> dict[str, float]:
    computed = actor.backward(batch, LOSS, counts(batch)) if waits else None
    actor.outputs(batch_of(9), LOGPROBS)
    computed = computed or actor.backward(batch, LOSS, counts(batch))
    return actor.apply(computed, learning_rate=1e-2, scale=0.3)


def trained(megatron: Megatron, clip: float = 0.0, waits: bool = False) -> tuple[list[dict], list[torch.Tensor]]:
    actor = build(megatron, clip)
    told = [step(actor, batch_of(seed), waits and seed > 1) for seed in (1, 2, 3)]
    return told, [actor.outputs(batch_of(9), LOGPROBS)["logprobs"], *actor.snapshot()]


def gradient(megatron: Megatron) -> tuple[float, list[torch.Tensor]]:
    """Megatron's norm, and the whole gradient, of which each rank has its part of each bucket."""
    actor = build(megatron)
    actor.backward(batch_of(1), LOSS, counts(batch_of(1)))
    for bucket in chain.from_iterable(buffer.buckets for chunk in actor.chunks for buffer in chunk.buffers):
        own = shard_buffer(bucket.grad_data, parallel.dp_size())[parallel.dp_rank()].clone()
        dist.all_gather_into_tensor(bucket.grad_data, own, group=parallel.dp_group())
    found = [p.main_grad.clone() for model in actor.models for p in model.parameters()]
    return actor.optimizer.grad_norm(), found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def check_gradients() -> None:
    (norm, whole), (norm_in_buckets, in_buckets) = gradient(APART), gradient(BUCKETS)
    assert same(whole, in_buckets)
    exact = torch.cat([g.double().flatten() for g in whole]).norm().item()
    assert max(abs(norm - exact), abs(norm_in_buckets - exact)) < ROUNDING * exact, (norm, norm_in_buckets, exact)


def check_trainings() -> None:
    for megatron, clip in ((ONE_BUCKET, CLIP), (BUCKETS, 0.0)):
        (told, apart), (told_overlapped, overlapped) = trained(APART, clip), trained(megatron, clip)
        assert same(apart, overlapped), (megatron, clip)
        if clip:
            assert told == told_overlapped and min(each["grad_norm"] for each in told) > CLIP
    (told, at_once), (told_later, waiting) = trained(ONE_BUCKET), trained(ONE_BUCKET, waits=True)
    assert told == told_later and same(at_once, waiting)


if __name__ == "__main__":
    parallel.initialize(APART)
    check_gradients()
    check_trainings()
    print(f"rank {dist.get_rank()}: the same bits")
    parallel.shutdown()
