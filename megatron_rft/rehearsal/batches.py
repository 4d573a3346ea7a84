"""A batch of the recipe's sizes: identical micro-batches of sequences with spread lengths, full to the token budget.

The micro-batches are identical so that a few of them stand for all of a step. Token ids mean nothing.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rft.records import Batch

FILL = 0.96  # of the token budget; the plan of a real batch comes close to it


@dataclass(frozen=True)
class Shape:
    """Of one micro-batch: prompt lengths and response lengths of its sequences."""

    prompt: int
    responses: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.responses) * self.prompt + sum(self.responses)


def micro_batch(prompt: int, longest: int, fraction: float, budget: int) -> Shape:
    """As many sequences as fit with responses of `fraction` of the longest on average, their lengths spread evenly from
    a tenth to nearly twice the mean, then stretched to fill the budget."""
    mean = max(1.0, fraction * longest)
    count = max(1, int(budget * FILL / (prompt + mean)))
    spread = torch.linspace(0.1, 1.9, count) if count > 1 else torch.ones(1)
    lengths, room = spread * mean, budget * FILL - count * prompt
    for _ in range(8):  # what the longest leave is spread over the others
        lengths = (lengths * (room / lengths.sum())).clamp(1, longest)
    lengths = lengths.floor()
    return Shape(prompt, tuple(int(length) for length in lengths))


def batch_of(shape: Shape, count: int, group: int) -> Batch:
    """`count` sequences; micro-batch after micro-batch has the lengths of `shape`. Rewards differ within groups."""
    number = torch.arange(count)
    responses = torch.tensor(shape.responses).repeat(-(-count // len(shape.responses)))[:count]
    prompts, total = torch.full((count,), shape.prompt), int(responses.sum())
    rewards = ((number + number // group) % 2).float()
    zeros = torch.zeros(total)
    return Batch(
        torch.ones(count * shape.prompt, dtype=torch.long),
        prompts,
        torch.ones(total, dtype=torch.long),
        responses,
        tokens={"rollout_logprobs": zeros, "response_mask": zeros + 1},
        sequences={
            "group": number // group,
            "rewards": rewards,
            "shaping": torch.zeros(count),
            "finished": torch.ones(count),
            "prompt_index": number // group,
            "weight_version": torch.zeros(count, dtype=torch.long),
        },
        scalars={"sampled_reward_sum": rewards.sum().item(), "sampled_count": float(count)},
    )


def with_contexts(batch: Batch, more: int) -> Batch:
    """Each prompt once more, with `more` tokens of feedback."""
    lens = batch.prompt_lens + more
    return _beside(batch, "context", lens)


def with_refined(batch: Batch, every: int = 2) -> Batch:
    """A refined response, as long as its own, beside every second response."""
    lens = torch.where(torch.arange(len(batch)) % every == 0, batch.response_lens, 0)
    return _beside(batch, "refined", lens)


def _beside(batch: Batch, name: str, lens: Tensor) -> Batch:
    ids = torch.ones(int(lens.sum()), dtype=torch.long)
    return replace(batch, **{f"{name}_ids": ids, f"{name}_lens": lens})
