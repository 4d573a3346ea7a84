"""Vocab-parallel log-probs on two gloo ranks against one rank: values, gradients, and a rank with only padding."""

import os
import sys

import torch
import torch.distributed as dist

from megatron_rft.megatron.vocabulary import logprobs_and_entropy
from megatron_rft.records import Support
from tests.parity.launch import run_ranks

RANKS, HIDDEN, PADDED = 2, 8, 256


def problem(tokens):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    targets = torch.randint(0, 100, (tokens,), generator=generator)
    return hidden, weight, targets, torch.randn(2, tokens, generator=generator)


CASES = [(200, 13, 0), (101, 13, 0), (200, 0, 0), (200, 13, 6), (101, 13, 6)]
"""(vocabulary, tokens, size of the support of truncated sampling or 0): with 101, rank 1 holds nothing but padding"""


def support(targets, size):
    """The target and tokens in steps of 29: each rank has some, or none."""
    ids = (targets[:, None] + 29 * torch.arange(size)) % 100
    return Support(ids.flatten(), torch.full((len(targets),), size)) if size else None


def measured(hidden, weight, targets, pulls, **options):
    """Log-probs and entropies, and the gradients of a weighted sum of both."""
    hidden, weight = (t.detach().clone().requires_grad_() for t in (hidden, weight))
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, temperature=0.8, **options)
    (pulls[0] @ logprobs + pulls[1] @ entropy).backward()
    return [t.detach() for t in (logprobs, entropy)] + [hidden.grad, weight.grad]


def on_a_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for case, (vocab_size, tokens, size) in enumerate(CASES):
        hidden, weight, targets, pulls = problem(tokens)
        options = {"vocab_size": vocab_size, "support": support(targets, size)}
        found = measured(hidden, weight.chunk(RANKS)[rank], targets, pulls, group=dist.group.WORLD, **options)
        dist.all_reduce(found[2])  # the gradient of hidden: summing it is the caller's duty
        torch.save(found, f"{folder}/{case}.{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_equal_one(tmp_path):
    run_ranks(__file__, RANKS, tmp_path)
    for case, (vocab_size, tokens, size) in enumerate(CASES):
        ranks = [torch.load(tmp_path / f"{case}.{rank}.pt") for rank in range(RANKS)]
        given = problem(tokens)
        *expected, grad_weight = measured(*given, vocab_size=vocab_size, support=support(given[2], size))
        for found in ranks:
            torch.testing.assert_close(found[:3], expected, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(torch.cat([found[3] for found in ranks]), grad_weight, rtol=2e-5, atol=2e-5)


if __name__ == "__main__":
    on_a_rank(int(os.environ["RANK"]), sys.argv[1])
