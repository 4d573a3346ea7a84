"""Two vocab-parallel distributions on two gloo ranks against one rank: values, gradients, and a rank with only
padding."""

import os
import sys

import torch
import torch.distributed as dist

from megatron_rft.megatron.two_distributions import NAMES, WITH_GRADIENT, compare
from tests.parity.launch import run_ranks

RANKS, HIDDEN, OTHER_HIDDEN, PADDED = 2, 8, 6, 256
CASES = [(200, 13), (101, 13), (200, 0)]  # (vocabulary, tokens): with 101, rank 1 holds nothing but padding


def problem(tokens):
    generator = torch.Generator().manual_seed(1)
    shapes = ((tokens, HIDDEN), (PADDED, HIDDEN), (tokens, OTHER_HIDDEN), (PADDED, OTHER_HIDDEN))
    tensors = [torch.randn(*shape, generator=generator) for shape in shapes]
    targets = torch.randint(0, 100, (tokens,), generator=generator)
    return tensors, targets, torch.randn(len(WITH_GRADIENT), tokens, generator=generator)


def measured(tensors, targets, pulls, **options):
    """All values, and the gradients of a weighted sum of the differentiable ones."""
    hidden, weight, *other = (t.detach().clone() for t in tensors)
    hidden.requires_grad_(), weight.requires_grad_()
    found = compare(hidden, weight, *other, targets, names=NAMES, temperature=0.8, extrapolation=2.0, **options)
    sum(pull @ found[name] for pull, name in zip(pulls, sorted(WITH_GRADIENT), strict=True)).backward()
    return [torch.stack([found[name].detach() for name in sorted(NAMES)]), hidden.grad, weight.grad]


def on_a_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for case, (vocab_size, tokens) in enumerate(CASES):
        (hidden, weight, other_hidden, other_weight), targets, pulls = problem(tokens)
        shard = [hidden, weight.chunk(RANKS)[rank], other_hidden, other_weight.chunk(RANKS)[rank]]
        found = measured(shard, targets, pulls, group=dist.group.WORLD, vocab_size=vocab_size)
        dist.all_reduce(found[1])  # the gradient of hidden: summing it is the caller's duty
        torch.save(found, f"{folder}/{case}.{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_one(tmp_path):
    run_ranks(__file__, RANKS, tmp_path)
    for case, (vocab_size, tokens) in enumerate(CASES):
        ranks = [torch.load(tmp_path / f"{case}.{rank}.pt") for rank in range(RANKS)]
        *expected, grad_weight = measured(*problem(tokens), vocab_size=vocab_size)
        for found in ranks:
            torch.testing.assert_close(found[:2], expected, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(torch.cat([found[2] for found in ranks]), grad_weight, rtol=2e-5, atol=2e-5)


if __name__ == "__main__":
    on_a_rank(int(os.environ["RANK"]), sys.argv[1])
