"""Methods that compare a right and a wrong trajectory of one problem.

The trajectories of a pair share a `unit`, so they are in one micro-batch.
"""

from abc import abstractmethod
from itertools import cycle, islice, product

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_rft.config.algorithms import offline as section
from megatron_rft.objectives.base import Outputs, Sum, sequence_means, trained_tokens
from megatron_rft.objectives.offline.base import Offline, log_ratios, weights
from megatron_rft.records import Batch, like, send
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
    positions: list[tuple[int, int]] = []
    for right, wrong in members.values():
        count = {"cover": max(len(right), len(wrong)), "one": 1, "all": 0}[how] if right and wrong else 0
        positions += islice(zip(cycle(right), cycle(wrong), strict=False), count)
        positions += product(right, wrong) if how == "all" else ()
    return positions


def split_pairs(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """[B] -> ([U] of the right, [U] of the wrong trajectory of each pair), differentiable."""
    trained = trained_tokens(batch) > 0  # a rank without work forwards one sequence without trained tokens
    right = batch.sequences["rewards"] > 0
    positions = [side.nonzero().flatten() for side in (trained & right, trained & ~right)]
    sides = [position[batch.units[position].argsort()] for position in positions]
    units = [batch.units[side] for side in sides]
    assert torch.equal(*units) and len(units[0].unique()) == len(units[0]), "a unit is one right and one wrong"
    right, wrong = (values[send(side, values.device)] for side in sides)
    return right, wrong


class Pairwise(Offline):
    """A loss per pair, computed from the `score` of each side."""

    options: section.Pairwise

    def examples(self, data: Batch) -> list[tuple[int, ...]]:
        positions = pair_up(data.sequences["rewards"].tolist(), data.groups.tolist(), self.options.pairing)
        if not positions:
            raise DataError("algorithm.name: this method compares pairs, and no problem has a right and a wrong answer")
        return positions

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
        result = super().loss(outputs, batch)
        right, wrong = split_pairs(self.score(outputs, batch).detach(), batch)
        result.metrics["dynamics/margin"] = Sum((right - wrong).sum(), "units")
        result.metrics["dynamics/pair_accuracy"] = Sum((right > wrong).to(right).sum(), "units")
        return result


class DPO(Pairwise):
    """DPO (arXiv:2305.18290 Eq. 7; fpa.txt B.2), with r(y) = log pi(y|x) - log pi_ref(y|x):

    loss = mean over pairs of -log sigmoid(beta (r(y_w) - r(y_l)))
    """

    options: section.DPO

    def pair_loss(self, right: Tensor, wrong: Tensor) -> Tensor:
        return -logsigmoid(self.options.beta * (right - wrong))


class RPO(DPO):
    """RPO (arXiv:2404.19733 Eq. 1; fpa.txt B.2): DPO plus the length-normalised likelihood of the right trajectory.

    loss = DPO + alpha mean over pairs of -(1/|y_w|) log pi(y_w|x)
    """

    options: section.RPO

    def terms(self, outputs: Outputs, batch: Batch) -> dict[str, tuple[float, Sum]]:
        right, _ = split_pairs(sequence_means(outputs["logprobs"], batch), batch)
        return super().terms(outputs, batch) | {"nll": (self.options.alpha, Sum(-right.sum(), "units"))}


class IPO(Pairwise):
    """IPO (arXiv:2310.12036 Eq. 17): regression of the margin between log-ratios to 1 / (2 beta).

        loss = mean over pairs of (r(y_w) - r(y_l) - 1 / (2 beta))^2

    r is the mean log-ratio per token, as the authors recommend; with
    length_normalised=False it is the paper's sum.
    """

    options: section.IPO

    def score(self, outputs: Outputs, batch: Batch) -> Tensor:
        if not self.options.length_normalised:
            return super().score(outputs, batch)
        logprobs = outputs["logprobs"]
        return sequence_means(logprobs - like(batch.tokens["ref_logprobs"], logprobs), batch)

    def pair_loss(self, right: Tensor, wrong: Tensor) -> Tensor:
        return (right - wrong - 1 / (2 * self.options.beta)) ** 2


class SimPO(Pairwise):
    """SimPO (arXiv:2405.14734 Eq. 6): preference by length-normalised likelihood, with a margin, without a reference.

    loss = mean over pairs of -log sigmoid(beta/|y_w| log pi(y_w|x) - beta/|y_l| log pi(y_l|x) - gamma)
    """

    options: section.SimPO

    def score(self, outputs: Outputs, batch: Batch) -> Tensor:
        return sequence_means(outputs["logprobs"], batch)

    def pair_loss(self, right: Tensor, wrong: Tensor) -> Tensor:
        return -logsigmoid(self.options.beta * (right - wrong) - self.options.gamma)


class SimPER(Pairwise):
    """SimPER (arXiv:2502.00883; fpa.txt Eq. 9): compares the inverse perplexities of both sides, without a reference.

        loss = mean over pairs of -(pi(y_w|x)^(1/|y_w|) - pi(y_l|x)^(1/|y_l|))

    Its gradient is twice Off-RL's on the same trajectories (fpa.txt A.1), because Off-RL averages over trajectories
    instead of pairs.
    """

    options: section.SimPER

    def score(self, outputs: Outputs, batch: Batch) -> Tensor:
        return weights(outputs["logprobs"], batch)

    def pair_loss(self, right: Tensor, wrong: Tensor) -> Tensor:
        return wrong - right
