"""Makes a batch of the recipe's sizes: identical micro-batches of sequences of many lengths, up to the token budget.

The micro-batches are identical, so that a few of them stand for all of a step. Token ids have no meaning.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_rft.records import Batch, segment_ids

FILL = 0.96  # share of the token budget; micro-batches of a real batch come close to it


@dataclass(frozen=True)
class Shape:
    """The lengths of one micro-batch: of each prompt and of the responses. `sharing` responses share a prompt."""

    prompt: int
    responses: tuple[int, ...]
    sharing: int = 1


def micro_batch(prompt: int, longest: int, fraction: float, budget: int, group: int = 1) -> Shape:
    """Return as many sequences as fit into `budget` tokens. Responses have `fraction` of `longest` on average; their
    lengths are spread evenly from a tenth to nearly twice the mean, then stretched to fill the budget. `group`: number
    of responses that share a prompt, if they fit."""
    mean, room = max(1.0, fraction * longest), budget * FILL
    sharing = max(1, min(group, int((room - prompt) / mean)))
    count = sharing * max(1, int(room / (prompt + sharing * mean)))
    spread = torch.linspace(0.1, 1.9, count) if count > 1 else torch.ones(1)
    lengths, room = spread * mean, room - count // sharing * prompt
    for _ in range(8):  # a cut response leaves room for the others
        lengths = (lengths * (room / lengths.sum())).clamp(1, longest)
    return Shape(prompt, tuple(int(length) for length in lengths.floor()), sharing)


def batch_of(shape: Shape, count: int, group: int) -> Batch:
    """Return a batch of `count` sequences. Each micro-batch has the lengths of `shape`. The part of a group in a
    micro-batch has its own prompt. Rewards differ within groups."""
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


def with_images(batch: Batch, token: int, count: int) -> Batch:
    """Put the image `token` in `count` places of each prompt, behind its first. All prompts have the same length."""
    ids = batch.prompt_ids.view(len(batch), -1)
    keys, ids = ids[:, 0].clone(), ids.clone()
    ids[:, 1 : count + 1] = token
    return replace(batch, prompt_ids=ids.flatten()).with_sequences(images=keys)


def with_contexts(batch: Batch, more: int) -> Batch:
    """Add contexts to the batch: each prompt with `more` tokens of feedback."""
    return _beside(batch, "context", batch.prompt_lens + more)


def with_refined(batch: Batch, every: int = 2) -> Batch:
    """Add a refined response of the same length to one of `every` responses."""
    lens = torch.where(torch.arange(len(batch)) % every == 0, batch.response_lens, 0)
    return _beside(batch, "refined", lens)


def with_different_logprobs(batch: Batch) -> Batch:
    """Make the log-probs of the models differ: SDPO and PIPO make no update if all are equal."""
    names = sorted(name for name in batch.tokens if name.endswith("logprobs"))
    return batch.with_tokens(**{name: batch.tokens[name] - 0.01 * i for i, name in enumerate(names)})


def _beside(batch: Batch, name: str, lens: Tensor) -> Batch:
    ids = segment_ids(lens)
    return replace(batch, **{f"{name}_ids": ids, f"{name}_lens": lens})
