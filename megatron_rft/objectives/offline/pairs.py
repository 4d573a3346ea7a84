"""Pairs of a right and a wrong trajectory of one problem, and the base class of losses over pairs.

The trajectories of a pair share a `unit`, so they are in one micro-batch.
"""

from abc import abstractmethod
from itertools import cycle, islice, product

import torch
from torch import Tensor

from megatron_rft.config.algorithms.offline import base as section
from megatron_rft.objectives.base import Outputs, Sum, sequence_means, trained_tokens
from megatron_rft.objectives.offline.base import Offline, log_ratios
from megatron_rft.records import Batch, send
from megatron_rft.utils.errors import DataError


def pair_up(rewards: list[float], groups: list[int], how: str = "cover") -> list[tuple[int, int]]:
    """Positions (right, wrong) of trajectories of the same problem, problem by problem.

    cover: the fewest pairs that contain every trajectory; those of the smaller side repeat in turn.
    one: the first right and the first wrong of each problem. all: each right with each wrong.

        rewards (+ - + -), one problem:   cover (0 1) (2 3)   one (0 1)   all (0 1) (0 3) (2 1) (2 3)
    """
    members: dict[int, tuple[list[int], list[int]]] = {}
    for position, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        members.setdefault(group, ([], []))[reward <= 0].append(position)
    found: list[tuple[int, int]] = []
    for right, wrong in members.values():
        count = {"cover": max(len(right), len(wrong)), "one": 1, "all": 0}[how] if right and wrong else 0
        found += islice(zip(cycle(right), cycle(wrong), strict=False), count)
        found += product(right, wrong) if how == "all" else ()
    return found


def split_pairs(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """[B] -> ([U] of the right, [U] of the wrong trajectory of each pair), differentiable."""
    trained = trained_tokens(batch) > 0  # a rank without work forwards one sequence without trained tokens
    right = batch.sequences["rewards"] > 0
    sides = []
    for side in (trained & right, trained & ~right):
        position = side.nonzero().flatten()
        sides.append(position[batch.units[position].argsort()])
    units = [batch.units[side] for side in sides]
    assert torch.equal(*units) and len(units[0].unique()) == len(units[0]), "a unit is one right and one wrong"
    return tuple(values[send(side, values.device)] for side in sides)


class Pairwise(Offline):
    """A loss per pair, computed from the `score` of each side."""

    options: section.Pairwise

    def examples(self, data: Batch) -> list[tuple[int, ...]]:
        found = pair_up(data.sequences["rewards"].tolist(), data.groups.tolist(), self.options.pairing)
        if not found:
            raise DataError("algorithm.name: this method compares pairs, and no problem has a right and a wrong answer")
        return found

    def score(self, outputs: Outputs, batch: Batch) -> Tensor:
        """[B] the number by which the sides are compared. Default: the log-ratio to the reference."""
        return log_ratios(outputs["logprobs"], batch)

    @abstractmethod
    def pair_loss(self, right: Tensor, wrong: Tensor) -> Tensor:
        """[U] scores of both sides -> [U] losses."""

    def terms(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[float, Sum]]:
        right, wrong = split_pairs(self.score(outputs, batch), batch)
        return {"preference": (1.0, Sum(self.pair_loss(right, wrong).sum(), "units"))}

    def loss(self, outputs: Outputs, batch: Batch):
        found = super().loss(outputs, batch)
        right, wrong = split_pairs(self.score(outputs, batch).detach(), batch)
        found.metrics["dynamics/margin"] = Sum((right - wrong).sum(), "units")
        found.metrics["dynamics/pair_accuracy"] = Sum((right > wrong).to(right).sum(), "units")
        return found


def mean_logprobs(outputs: Outputs, batch: Batch) -> Tensor:
    """[B] (1/|y|) log pi(y|x)."""
    return sequence_means(outputs["logprobs"], batch)
