"""Distributes sequences over data-parallel ranks and micro-batches.

Every rank computes the same plan, a pure function of the lengths, which all ranks have: if one rank sent its plan, the
others would wait for it and for the message. With shared prompts, sequences of one prompt stay in one micro-batch if
the token budget allows it, because the prompt is then computed once. A group that does not fit is split between
responses, and each part computes the prompt again. Costs count the computed tokens.
"""

import heapq
import math
from collections.abc import Hashable

import torch
from torch import Tensor

from megatron_rft.megatron.packing import fed_lens
from megatron_rft.records import Batch

Unit = list[int]  # positions of sequences that must stay together


class Costs:
    """Returns the number of tokens that sequences of a batch need in one micro-batch."""

    def __init__(self, batch: Batch, share_prompts: bool):
        self.prompts = (batch.prompt_numbers if share_prompts else torch.arange(len(batch))).tolist()
        self.prompt_lens, self.response_lens = batch.prompt_lens.tolist(), fed_lens(batch).tolist()

    def responses(self, unit: Unit) -> int:
        return sum(self.response_lens[position] for position in unit)

    def __call__(self, unit: Unit) -> int:
        lens = {self.prompts[position]: self.prompt_lens[position] for position in unit}
        return sum(lens.values()) + self.responses(unit)


def plan(
    batch: Batch, dp_size: int, token_budget: int, count_multiple: int = 1, share_prompts: bool = False
) -> list[list[Tensor]]:
    """Return [dp][micro-batch] -> positions in `batch`.

    Every rank gets the same number of micro-batches (pipeline and expert parallelism need that), a multiple of
    `count_multiple`, as few as the token budget allows, with about equal token counts. Units are not split: one beyond
    the budget, as an episode of many segments may be, is alone in a micro-batch. A micro-batch may be empty.
    """
    costs = Costs(batch, share_prompts)
    groups = _groups(batch, costs, token_budget)
    share = sum(costs(sum(group, [])) for group in groups) / (dp_size * count_multiple)
    # Groups in smaller parts than the budget requires may balance several ranks better.
    caps = [token_budget] if dp_size * count_multiple == 1 else [token_budget, min(token_budget, math.ceil(share / 2))]
    plans = [_plan(groups, costs, dp_size, count_multiple, token_budget, cap) for cap in caps]
    best = min(plans, key=lambda bins: _time(bins, costs, dp_size, count_multiple))
    members = [torch.tensor(sorted(each), dtype=torch.long) for each in best]
    return [members[rank::dp_size] for rank in range(dp_size)]


def plan_within(
    batch: Batch, members: list[Tensor], token_budget: int, count_multiple: int = 1, share_prompts: bool = False
) -> list[list[Tensor]]:
    """Plan micro-batches for given sequences of each data-parallel rank. `members` and the result are positions in
    `batch`."""
    cuts = [plan(batch.select(mine), 1, token_budget, count_multiple, share_prompts)[0] for mine in members]
    longest, nothing = max(len(cut) for cut in cuts), torch.zeros(0, dtype=torch.long)
    full = [cut + [nothing] * (longest - len(cut)) for cut in cuts]
    return [[mine[index] for index in cut] for mine, cut in zip(members, full, strict=True)]


def _groups(batch: Batch, costs: Costs, token_budget: int) -> list[list[Unit]]:
    """Return the units of the batch, grouped by their prompts; one beyond the budget is a group of its own."""
    _, number = batch.units.unique(return_inverse=True)
    units: list[Unit] = [[] for _ in range(int(number.max()) + 1 if len(number) else 0)]
    for position, unit in enumerate(number.tolist()):
        units[unit].append(position)
    groups: dict[Hashable, list[Unit]] = {}
    for unit in units:
        prompts = frozenset(costs.prompts[position] for position in unit)
        groups.setdefault((prompts, unit[0] if costs(unit) > token_budget else None), []).append(unit)
    return list(groups.values())


def _plan(
    groups: list[list[Unit]], costs: Costs, dp_size: int, count_multiple: int, token_budget: int, cap: int
) -> list[list[int]]:
    """Return the micro-batches of all ranks, the heaviest first."""
    pieces = [piece for group in groups for piece in _cut(group, costs, cap)]
    cost = [costs(piece) for piece in pieces]
    least = (min(each, token_budget) for each in cost)
    alone = sum(2 * each > token_budget for each in cost)  # no two of these fit into one micro-batch
    per_rank = max(1, math.ceil(sum(least) / (token_budget * dp_size)), math.ceil(alone / dp_size))
    per_rank = math.ceil(per_rank / count_multiple) * count_multiple
    while True:
        bins = _balanced(cost, dp_size * per_rank)
        fits = (len(content) < 2 or sum(cost[piece] for piece in content) <= token_budget for content in bins)
        if all(fits) or per_rank >= len(cost):
            break
        per_rank += count_multiple
    return [[position for piece in content for position in pieces[piece]] for content in bins]


def _cut(group: list[Unit], costs: Costs, cap: int) -> list[list[int]]:
    """Split a group into as few parts as `cap` tokens allow, without splitting a unit."""
    responses = [costs.responses(unit) for unit in group]
    room = cap - (costs(sum(group, [])) - sum(responses))  # beside the prompt
    least = max(1, min(math.ceil(sum(responses) / room), len(group))) if room > 0 else len(group)
    for count in range(least, len(group) + 1):
        parts = [sum((group[unit] for unit in sorted(part)), []) for part in _balanced(responses, count)]
        if max(map(costs, parts)) <= cap:
            break
    return parts


def _time(bins: list[list[int]], costs: Costs, dp_size: int, count_multiple: int) -> int:
    """Estimate the time in tokens: those of the busiest rank, and the pipeline's fill with the heaviest micro-batch."""
    cost = [costs(each) for each in bins]
    return max(sum(cost[rank::dp_size]) for rank in range(dp_size)) + (count_multiple - 1) * max(cost)


def _balanced(cost: list[int], bins: int) -> list[list[int]]:
    """Assign units to bins, the longest first to the lightest bin. Returns the heaviest bins first, so that a stride
    over them is balanced."""
    heap = [(0, index) for index in range(bins)]
    content: list[list[int]] = [[] for _ in range(bins)]
    for unit in sorted(range(len(cost)), key=lambda u: (-cost[u], u)):
        load, index = heapq.heappop(heap)
        content[index].append(unit)
        heapq.heappush(heap, (load + cost[unit], index))
    weight = {index: load for load, index in heap}
    return [content[index] for index in sorted(range(bins), key=lambda i: (-weight[i], i))]
