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
    """Of one micro-batch: its prompts' length, its responses' lengths, and how many responses share a prompt."""

    prompt: int
    responses: tuple[int, ...]
    sharing: int = 1

    @property
    def tokens(self) -> int:
        """That are computed: a shared prompt counts once."""
        return -(-len(self.responses) // self.sharing) * self.prompt + sum(self.responses)


def micro_batch(prompt: int, longest: int, fraction: float, budget: int, group: int = 1) -> Shape:
    """As many sequences as fit with responses of `fraction` of the longest on average, their lengths spread evenly from
    a tenth to nearly twice the mean, then stretched to fill the budget. `group`: responses that share a prompt, where
    they fit."""
    mean, room = max(1.0, fraction * longest), budget * FILL
    sharing = max(1, min(group, int((room - prompt) / mean)))
    count = sharing * max(1, int(room / (prompt + sharing * mean)))
    spread = torch.linspace(0.1, 1.9, count) if count > 1 else torch.ones(1)
    lengths, room = spread * mean, room - count // sharing * prompt
    for _ in range(8):  # what the longest leave is spread over the others
        lengths = (lengths * (room / lengths.sum())).clamp(1, longest)
    lengths = lengths.floor()
    return Shape(prompt, tuple(int(length) for length in lengths), sharing)


def batch_of(shape: Shape, count: int, group: int) -> Batch:
    """`count` sequences; micro-batch after micro-batch has the lengths of `shape`, and each share of a group has a
    prompt of its own. Rewards differ within groups."""
    number = torch.arange(count)
    responses = torch.tensor(shape.responses).repeat(-(-count // len(shape.responses)))[:count]
    prompts, total = torch.full((count,), shape.prompt), int(responses.sum())
    rewards = ((number + number // group) % 2).float()
    zeros = torch.zeros(total)
    return Batch(
        (number // shape.sharing).repeat_interleave(shape.prompt),
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
    """Each prompt once more, with `more` tokens of feedback of its own."""
    lens = batch.prompt_lens + more
    return _beside(batch, "context", lens)


def with_refined(batch: Batch, every: int = 2) -> Batch:
    """A refined response, as long as its own, beside every second response."""
    lens = torch.where(torch.arange(len(batch)) % every == 0, batch.response_lens, 0)
    return _beside(batch, "refined", lens)


def _beside(batch: Batch, name: str, lens: Tensor) -> Batch:
    ids = torch.arange(len(batch)).repeat_interleave(lens)
    return replace(batch, **{f"{name}_ids": ids, f"{name}_lens": lens})
