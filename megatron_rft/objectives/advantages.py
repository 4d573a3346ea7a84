"""Credit assignment from rewards. Pure functions: [B] rewards and group numbers, or [R] rewards of tokens."""

import torch
from torch import Tensor

from megatron_rft.records import Batch, segment_ids

ROUNDING = 1e-6  # relative, of rewards that are sums in fp32


def _group_sums(values: Tensor, groups: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).index_add_(0, groups, values)


def _centred(rewards: Tensor, group: Tensor, rounding: float = ROUNDING) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """In float64: (R_i - mean, 1 where all rewards of the group are equal, group sizes, group numbers), each [B].
    Rewards are equal if their spread is at most `rounding` times the largest, or times 1 if that is larger."""
    distinct, groups = group.unique(return_inverse=True)
    size, rewards = len(distinct), rewards.double()
    number = _group_sums(torch.ones_like(rewards), groups, size)[groups]
    highest, lowest = (
        rewards.new_zeros(size).scatter_reduce_(0, groups, rewards, how, include_self=False) for how in ("amax", "amin")
    )
    largest = torch.maximum(highest.abs(), lowest.abs()).clamp(min=1)
    equal = (highest - lowest <= rounding * largest)[groups]
    mean = _group_sums(rewards, groups, size)[groups] / number
    return torch.where(equal, 0.0, rewards - mean), equal, number, groups


def group_relative(rewards: Tensor, group: Tensor) -> Tensor:
    """A_i = (R_i - mean) / std within each group, with the population std (pipo.txt Eq. 3).

    A group whose rewards are all equal, up to rounding, gets exact zeros. Computed in float64.

    Args:
        rewards: [B] verifier rewards.
        group: [B] equal numbers mark one group.

    Returns:
        [B] float32.
    """
    difference, equal, number, groups = _centred(rewards, group)
    std = (_group_sums(difference**2, groups, len(groups))[groups] / number).sqrt()
    return torch.where(equal, 0.0, difference / torch.where(equal, 1.0, std)).float()


def group_centred(rewards: Tensor, group: Tensor, rounding: float = ROUNDING) -> Tensor:
    """A_i = R_i - mean within each group (Dr. GRPO, arXiv:2503.20783 Section 3.2). [B] -> [B]"""
    return _centred(rewards, group, rounding)[0].float()


def leave_one_out(rewards: Tensor, group: Tensor, rounding: float = ROUNDING) -> Tensor:
    """A_i = R_i - mean_{j != i} R_j = G / (G - 1) (R_i - mean) (RLOO, arXiv:2402.14740 Section 2). [B] -> [B]

    0 in a group of one response.
    """
    difference, _, number, _ = _centred(rewards, group, rounding)
    return (difference * number / (number - 1).clamp(min=1)).float()


def group_normalised(advantages: Tensor, group: Tensor) -> Tensor:
    """a_i = G A_i / sum_j |A_j| within each group (pipo.txt 4.1); a group of zeros stays zero. [B] -> [B]"""
    distinct, groups = group.unique(return_inverse=True)
    number = _group_sums(torch.ones_like(advantages), groups, len(distinct))
    total = _group_sums(advantages.abs(), groups, len(distinct))
    scale = torch.where(total > 0, number / torch.where(total > 0, total, 1.0), 0.0)
    return advantages * scale[groups]


def degenerate(rewards: Tensor, group: Tensor) -> Tensor:
    """[B] bool: all rewards of the sequence's group are equal, so its advantages are 0."""
    return _centred(rewards, group)[1]


def overlong_penalty(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """DAPO's soft overlong punishment (arXiv:2503.14476 Eq. 13): 0 up to limit - buffer, then down to -1 at the limit.

    [B] lengths in tokens -> [B].
    """
    return ((limit - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def to_tokens(values: Tensor, batch: Batch) -> Tensor:
    """[B] one value per sequence -> [R] the same for each of its response tokens."""
    return values[batch.sequence_ids]


def at_last_token(values: Tensor, batch: Batch) -> Tensor:
    """[B] -> [R] each value on the last token of its sequence that the policy wrote, 0 elsewhere."""
    positions, lens = _policy_tokens(batch)
    result = torch.zeros(len(batch.response_ids))
    result[positions[(lens.cumsum(0) - 1)[lens > 0]]] = values[lens > 0].float()
    return result


def at_turn_ends(scores: Tensor, batch: Batch) -> Tensor:
    """[B] -> [R] each score on its sequence's last token, and each turn's reward on the last token of the turn."""
    rewards = at_last_token(scores, batch)
    return rewards + batch.tokens["turn_rewards"] if "turn_rewards" in batch.tokens else rewards


def without_turns(rewards: Tensor, batch: Batch) -> Tensor:
    """[B] -> [B] rewards of episodes without those of their turns: the scores."""
    turns = batch.tokens.get("turn_rewards")
    if turns is None:
        return rewards
    return rewards - torch.zeros(len(batch)).index_add_(0, batch.sequence_ids, turns * batch.response_mask)


def gae(rewards: Tensor, values: Tensor, batch: Batch, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438; pipo.txt Eq. 2), on the tokens that the policy wrote.

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   return_t = A_t + V_t

    with V = 0 after the last token, also of a response cut off at the length limit. Tokens that the policy did not
    write are skipped and get 0. Computed in float64.

    Args:
        rewards: [R] of each token.
        values: [R] V(s_t), of the state before the token.

    Returns:
        ([R] advantages, [R] returns), float32.
    """
    positions, lens = _policy_tokens(batch)
    rewards, values = rewards.double()[positions], values.double()[positions]
    ends = lens.cumsum(0)
    following = torch.cat([values[1:], values.new_zeros(1)])
    following[(ends - 1)[lens > 0]] = 0.0
    delta = rewards + gamma * following - values
    row, longest = segment_ids(lens), int(lens.max()) if len(lens) else 0
    time = torch.arange(len(delta)) + (longest - ends).repeat_interleave(lens)
    by_time = delta.new_zeros(longest, len(lens))  # [T, B], all responses end at the last time
    by_time[time, row] = delta
    rows = by_time.unbind()
    for now, later in zip(rows[-2::-1], rows[:0:-1], strict=True):
        now.add_(later, alpha=gamma * lam)
    advantages = by_time[time, row]
    zeros = torch.zeros(len(batch.response_ids))
    advantages, returns = (zeros.index_copy(0, positions, x.float()) for x in (advantages, advantages + values))
    return advantages, returns


def rewards_to_go(rewards: Tensor, batch: Batch, gamma: float) -> Tensor:
    """[R] -> [R] sum_{k >= t} gamma^(k - t) r_k within each sequence."""
    return gae(rewards, torch.zeros_like(rewards), batch, gamma, 1.0)[0]


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Normalise the values with mask 1 to mean 0 and population std 1; 0 elsewhere, and if all are equal. [N] -> [N]"""
    chosen = values[mask > 0].double()
    if len(chosen) == 0 or bool((chosen == chosen[0]).all()):
        return torch.zeros_like(values)
    return torch.where(mask > 0, (values.double() - chosen.mean()) / chosen.std(correction=0), 0.0).float()


def _policy_tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Positions of the tokens that the policy wrote, and their number in each sequence [B]."""
    positions = (batch.response_mask > 0).nonzero().flatten()
    return positions, batch.sequence_ids[positions].bincount(minlength=len(batch))
