"""The base class of offline methods. Trajectories (x, y, R) with R in {+1, -1} were sampled once, from the reference.

A method defines its examples (trajectories, right ones only, pairs), the model outputs that it needs, and its loss.
Every method logs the same dynamics, separately for right and wrong trajectories (fpa.txt figures 2 and 3).
"""

import math
from abc import abstractmethod
from functools import partial

import torch
from torch import Tensor

from megatron_rft.config.algorithms import offline as section
from megatron_rft.objectives import base
from megatron_rft.records import Batch, like, send

LOW = 0.2  # weights below this are counted as low (fpa.txt figure 3, right)
SATURATED = 0.01  # weights closer to 0 or 1 than this are counted as saturated


class Offline(base.Objective):
    """One optimizer step per batch of trajectories. Log-probs are at temperature 1."""

    options: section.Offline
    outputs: frozenset[str] = frozenset({"logprobs"})
    needs: frozenset[str] = frozenset({"ref_logprobs"})

    @property
    def second(self) -> base.SecondDistribution | None:
        """The reference's distribution, if `outputs` compare with it."""
        return None

    def examples(self, data: Batch) -> list[tuple[int, ...]]:
        """The examples: tuples of positions in `data` that stay in one mini-batch. Default: single trajectories."""
        return [(position,) for position in range(len(data))]

    def annotate(self, data: Batch) -> Batch:
        """Add values per trajectory that are computed once from the whole data."""
        return data

    @abstractmethod
    def terms(self, outputs: base.Outputs, batch: Batch) -> dict[str, tuple[float, base.Sum]]:
        """The loss, as in `Loss.terms`."""

    def loss(self, outputs: base.Outputs, batch: Batch) -> base.Loss:
        return base.Loss(self.terms(outputs, batch), dynamics(outputs, batch))

    def prepare(self, batch: Batch, state: base.State) -> base.Prepared:
        update = base.Update("policy", batch, self.loss, self.outputs, counts=counts, second=self.second, parts=PARTS)
        return base.Prepared([update], state)


def counts(batch: Batch) -> dict[str, float]:
    """The denominators of a global mini-batch; right and wrong trajectories also have their own, NaN without any."""
    trained = base.trained_tokens(batch) > 0
    right = batch.sequences["rewards"] > 0
    parts = {"correct": trained & right, "incorrect": trained & ~right}
    return base.counts(batch) | {"one": 1.0} | {name: part.sum().item() or math.nan for name, part in parts.items()}


def over_sequences(values: Tensor, batch: Batch, per: str = "sequences") -> base.Sum:
    """[B] -> the sum over sequences with a trained token; `per` correct or incorrect: only over those."""
    taken = base.trained_tokens(batch) > 0
    if per != "sequences":
        taken &= (batch.sequences["rewards"] > 0) == (per == "correct")
    return base.Sum(torch.where(send(taken, values.device), values, 0.0).sum(), per)


def log_ratios(logprobs: Tensor, batch: Batch) -> Tensor:
    """[R] -> [B] log pi(y|x) - log pi_ref(y|x)."""
    return base.sequence_sums(logprobs - like(batch.tokens["ref_logprobs"], logprobs), batch)


def weights(logprobs: Tensor, batch: Batch) -> Tensor:
    """[R] -> [B] pi(y|x)^(1/|y|), the geometric mean of the tokens' probabilities."""
    return base.sequence_means(logprobs, batch).exp()


def dynamics(outputs: base.Outputs, batch: Batch) -> dict[str, base.Sum]:
    """Metrics of right and wrong trajectories: log-ratio to the reference, weight pi^(1/|y|), FPA's weight
    pi_hat^(1/|y|) and its ratio to pi^(1/|y|), and the number of wrong ones with a weight below `LOW`. Of all: the
    share whose FPA weight is closer to 0 or 1 than `SATURATED`."""
    logprobs = outputs["logprobs"].detach()
    values = {"log_ratio": log_ratios(logprobs, batch), "weight": weights(logprobs, batch)}
    metrics = {}
    if "extrapolated_logprobs" in outputs:
        future = values["future_weight"] = weights(outputs["extrapolated_logprobs"], batch)
        values["future_ratio"] = future / values["weight"]
        saturated = torch.minimum(future, 1 - future) < SATURATED
        metrics["dynamics/future_weight_saturated"] = over_sequences(saturated.to(logprobs), batch)
    metrics |= {
        f"dynamics/{name}_{part}": over_sequences(value, batch, part)
        for name, value in values.items()
        for part in ("correct", "incorrect")
    }
    for name in values.keys() & {"weight", "future_weight"}:
        low = over_sequences((values[name] < LOW).to(logprobs), batch, "incorrect")
        metrics[f"dynamics/low_{name}_incorrect"] = base.Sum(low.total, "one")
    return metrics


def part_of(loss: base.LossFunction, part: str) -> base.LossFunction:
    """The same loss with only the gradient of the "correct" or the "incorrect" trajectories (fpa.txt figure 8).

    The two gradients add up to the whole gradient.
    """

    def only(outputs: base.Outputs, batch: Batch) -> base.Loss:
        own = ((batch.sequences["rewards"] > 0) == (part == "correct"))[batch.sequence_ids]
        kept = {name: torch.where(send(own, value.device), value, value.detach()) for name, value in outputs.items()}
        return loss(kept, batch)

    return only


PARTS = {f"dynamics/grad_norm_{part}": partial(part_of, part=part) for part in ("correct", "incorrect")}
