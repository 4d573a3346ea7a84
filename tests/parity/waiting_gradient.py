"""A rank: steps on gradients that waited over a forward pass end with the bits of steps made at once.

Run by test_waiting_gradient.py. Megatron gathers parameters when a forward pass needs them, once after each backward
pass; the forward pass in between must not leave a rank with old ones.
"""

import torch
import torch.distributed as dist

from megatron_rft.config import Batching, Megatron
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import counts
from megatron_rft.records import Batch
from tests.made import made
from tests.unit.megatron.test_optimizer import CONFIG, batch_of

LOGPROBS = frozenset({"logprobs"})
OVERLAPPED = Megatron(overlap_grad_reduce=True, overlap_param_gather=True)
LOSS = made("sft").loss


def step(actor: Actor, batch: Batch, waits: bool) -> dict[str, float]:
    computed = actor.backward(batch, LOSS, counts(batch)) if waits else None
    actor.outputs(batch_of(9), LOGPROBS)
    return actor.step(batch, LOSS, counts(batch), learning_rate=1e-2, scale=0.3, computed=computed)


def trained(waits: bool) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    actor = Actor(CONFIG, OVERLAPPED, Batching(), "fp32", optimizer={"lr": 1e-2, "use_distributed_optimizer": True})
    actor.load(weights.random_tensors(CONFIG, seed=0))
    found = [step(actor, batch_of(seed), waits and seed > 1) for seed in (1, 2, 3)]
    return found, [actor.outputs(batch_of(9), LOGPROBS)["logprobs"], *actor.snapshot()]


if __name__ == "__main__":
    parallel.initialize(OVERLAPPED)
    (told, at_once), (told_later, waiting) = trained(False), trained(True)
    assert told == told_later, (told, told_later)
    assert all(torch.equal(one, other) for one, other in zip(at_once, waiting, strict=True))
    print(f"rank {dist.get_rank()}: the same bits")
    parallel.shutdown()
