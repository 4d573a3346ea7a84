"""The interface of an algorithm: the model outputs that it needs, its credit assignment, and its loss as sums.

A training step uses only this interface:

    batch = the sampled batch with the model outputs named in `objective.needs`
    updates, state = objective.prepare(batch, state)
    for update in updates: optimizer steps of update.model on update.batch, with update.loss

Losses are *sums with named denominators*. The trainer divides each sum by its count over the whole global mini-batch,
so gradients do not depend on how the mini-batch is split into micro-batches, packed, or spread over ranks.

A critic is a second `Update` with model "critic" and outputs {"values"}. Pairs share a `unit`. Refined responses join
an update's batch and have their own denominator. A plug-in wraps an objective and is itself an objective.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rft.config.algorithms.online import DEFAULT, Setting
from megatron_rft.config.sections import Section
from megatron_rft.records import Batch, like, segment_ids, send

State = dict[str, Tensor]  # flat, as safetensors requires
COMPUTED = "computed "  # prefix of the counts of the computed sequences
Outputs = dict[str, Tensor]  # the model's outputs for a micro-batch: "logprobs", "entropy", "values" ..., each [R]


@dataclass(frozen=True)
class Sum:
    """A sum over a micro-batch; `per` names the count that turns it into a mean over the global mini-batch."""

    total: Tensor  # scalar
    per: str  # a key of `counts`


@dataclass(frozen=True)
class Loss:
    """`terms` are differentiable and add up to the loss, each as weight * total / count; `metrics` are only logged."""

    terms: dict[str, tuple[float, Sum]]
    metrics: dict[str, Sum] = field(default_factory=dict)

    def mean(self, counts: dict[str, float]) -> Tensor:
        """This micro-batch's share of the loss: its sums over the *global* counts."""
        shares = [weight * term.total / counts[term.per] for weight, term in self.terms.values()]
        return sum(shares[1:], shares[0])

    def logged(self, counts: dict[str, float]) -> dict[str, Tensor]:
        """This micro-batch's share of what is logged: the terms (detached, unweighted) over the counts of the whole
        mini-batch, and the metrics over those of its computed sequences."""
        terms = {name: term.total.detach() / counts[term.per] for name, (_, term) in self.terms.items()}
        of_computed = {
            name: entry.total.detach() / counts.get(COMPUTED + entry.per, counts[entry.per])
            for name, entry in self.metrics.items()
        }
        return terms | of_computed


LossFunction = Callable[[Outputs, Batch], Loss]


def trained_tokens(batch: Batch) -> Tensor:
    """[B] the number of response tokens with mask 1."""
    return torch.zeros(len(batch)).index_add_(0, batch.sequence_ids, batch.response_mask)


def counts(batch: Batch) -> dict[str, float]:
    """The denominators of a global mini-batch, each at least 1. Sequences and groups without a trained token do not
    count."""
    trained = trained_tokens(batch)
    return {
        "response_tokens": max(trained.sum().item(), 1.0),
        "sequences": max((trained > 0).sum().item(), 1.0),
        "groups": max(len(batch.groups[trained > 0].unique()), 1.0),
        "units": max(len(batch.units.unique()), 1.0),
    }


def zero_sequences(values: Tensor, batch: Batch) -> Tensor:
    """[R] -> [B] bool: whether all values on tokens with mask 1 are zero."""
    return sequence_sums((values != 0).float(), batch) == 0


def with_gradient(batch: Batch) -> Batch:
    """The sequences of a mini-batch that are not marked as `no_gradient`; all if none of the others has a trained
    token (refined ones do not), since the metrics would be means over nothing."""
    marked = batch.sequences.get("no_gradient")
    if marked is None or not marked.any() or not trained_tokens(batch)[~marked].any():
        return batch
    return batch.select(~marked)


@dataclass(frozen=True)
class SecondDistribution:
    """A second distribution q over the same response tokens, without a gradient, for losses that compare with it.

    weights: those of the current "actor", the frozen "reference", the moving-average "teacher", or the other model of
        a distillation, "distil".
    in_context: q is conditioned on batch.context_ids instead of the prompts.
    extrapolation: lambda of "extrapolated_logprobs", the log-probs of softmax((1 + lambda) h - lambda h_q).
    mixture: the share of q in the mixture of "jsd".

    `Update.outputs` may then name "other_logprobs" (of q), "extrapolated_logprobs", and with a gradient "reverse_kl",
    KL(pi || q), "forward_kl", KL(q || pi), and "jsd", all exact sums over the vocabulary, each [R].
    """

    weights: str
    in_context: bool = False
    extrapolation: float = 0.0
    mixture: float = 0.5


@dataclass(frozen=True)
class Update:
    """Optimizer steps of one model on one batch: `epochs` passes over `mini_batches` parts of about equal size.

    batch.sequences["no_gradient"], if present, marks sequences on which `loss` has a gradient of zero. They count in
    the denominators, but the trainer may leave them out (`with_gradient`).

    parts: name of the metric for the gradient norm of a part of the loss -> what restricts a loss to that part.
    """

    name: str  # "policy", "verification", "value": prefix of its metrics
    batch: Batch
    loss: LossFunction
    outputs: frozenset[str] = frozenset({"logprobs"})
    model: str = "actor"
    mini_batches: int = 1
    epochs: int = 1
    learning_rate: float | None = None  # None: the model's schedule, which each step advances
    second: SecondDistribution | None = None
    counts: Callable[[Batch], dict[str, float]] = counts  # the denominators that `loss` names
    moments: str = "own"  # the optimizer's moments for these steps: the model's own, or a separate named set
    parts: dict[str, Callable[[LossFunction], LossFunction]] = field(default_factory=dict)
    scale: float = 1.0  # positive factor of loss and gradient, applied after the backward pass
    idle: bool = False  # make no step if all are marked: without a gradient Adam's momentum would move the weights

    def computed(self, mini_batch: Batch, skip: bool = False) -> tuple[Batch, dict[str, float]]:
        """The sequences to compute, with `skip` only those with a gradient, and the counts: of the whole mini-batch,
        and, if these are fewer, theirs under names that begin with COMPUTED."""
        batch = with_gradient(mini_batch) if skip else mini_batch
        counts = self.counts(mini_batch)
        if batch is not mini_batch:
            counts |= {COMPUTED + name: count for name, count in self.counts(batch).items()}
        return batch, counts

    def steps(self) -> Iterator[Batch]:
        """The mini-batches in order, none empty. Sequences of one group stay in one mini-batch.

        Adds `group_tokens` [B], the number of trained tokens in each sequence's group: a micro-batch may hold only a
        part of a group.
        """
        groups, group_of = self.batch.groups.unique(return_inverse=True)
        count = len(groups)
        trained = torch.zeros(count).index_add_(0, group_of, trained_tokens(self.batch))
        batch = self.batch.with_sequences(group_tokens=trained[group_of])
        unmarked = ~batch.sequences.get("no_gradient", torch.zeros(len(batch), dtype=torch.bool))
        for _ in range(self.epochs if unmarked.any() or (count and not self.idle) else 0):
            for part in torch.arange(count).tensor_split(min(self.mini_batches, count)):
                yield batch.select(torch.isin(group_of, part))


@dataclass(frozen=True)
class Prepared:
    updates: list[Update]
    state: State
    metrics: dict[str, float] = field(default_factory=dict)


class Objective(ABC):
    """One algorithm. Its methods are pure functions of tensors: no process groups, equal results on every rank.

    `options` is its section of the recipe; the annotated type defines the options and their defaults.
    """

    options: Section

    def __init__(self, options: Section, setting: Setting = DEFAULT):
        self.options, self.setting = options, setting

    needs: frozenset[str] = frozenset()
    """Values that `prepare` reads from the batch: "old_logprobs", "ref_logprobs", "teacher_logprobs",
    "values", "refined_logprobs"; and "reference" if an update compares with the reference's distribution."""

    def init(self) -> State:
        """The state before the first step. Each `prepare` returns the next one; checkpoints contain it."""
        return {}

    def keep(self, batch: Batch) -> Tensor:
        """[B] bool: the sequences to train on. The sampler may replace the other groups with new ones (DAPO)."""
        return torch.ones(len(batch), dtype=torch.bool)

    @abstractmethod
    def prepare(self, batch: Batch, state: State) -> Prepared:
        """Attribute credit and return the updates to make."""

    def update(self, *what: Any, **more: Any) -> Update:
        """An online method's `Update`, with the optimizer steps of the recipe."""
        options: Any = self.options
        return Update(*what, mini_batches=self.setting.mini_batches, epochs=options.epochs, **more)


class PolicyObjective(Objective):
    """An online policy-gradient method. A plug-in may call each of its parts separately."""

    attribution_needs: frozenset[str] = frozenset()  # what `improvement_attributions` reads in addition to `needs`

    @abstractmethod
    def advantages(self, batch: Batch) -> Tensor:
        """[R] the credit of each response token."""

    @abstractmethod
    def surrogate(self, outputs: Outputs, batch: Batch) -> Loss:
        """The clipped objective alone (no KL, no bonus), on batch.tokens["advantages"] and ["old_logprobs"]. It must be
        proportional to the advantages: PIPO multiplies its gradient by abs(phi)."""

    def trained(self, batch: Batch) -> Tensor:
        """[B] bool: the sequences in the policy's update. PIPO verifies these."""
        return torch.ones(len(batch), dtype=torch.bool)

    def improvement_attributions(self, batch: Batch) -> Tensor:
        """[R] the attribution that PIPO scales (pipo.txt 4.1), times the loss's importance weights."""
        return self.advantages(batch)


class Plugin(PolicyObjective):
    """Wraps an objective, `base`. What a plug-in does not override is the base's."""

    def __init__(self, base: PolicyObjective, options: Section, setting: Setting = DEFAULT):
        super().__init__(options, setting)
        self.base, self.attribution_needs = base, base.attribution_needs

    @property
    def needs(self) -> frozenset[str]:
        return self.base.needs

    def init(self) -> State:
        return self.base.init()

    def keep(self, batch: Batch) -> Tensor:
        return self.base.keep(batch)

    def trained(self, batch: Batch) -> Tensor:
        return self.base.trained(batch)

    def advantages(self, batch: Batch) -> Tensor:
        return self.base.advantages(batch)

    def surrogate(self, outputs: Outputs, batch: Batch) -> Loss:
        return self.base.surrogate(outputs, batch)

    def improvement_attributions(self, batch: Batch) -> Tensor:
        return self.base.improvement_attributions(batch)


def sequence_sums(values: Tensor, batch: Batch) -> Tensor:
    """[R] -> [B] sums over each sequence's tokens with mask 1, differentiable."""
    ids = send(segment_ids(batch.response_lens), values.device)
    return values.new_zeros(len(batch)).index_add(0, ids, values * like(batch.response_mask, values))


def sequence_means(values: Tensor, batch: Batch) -> Tensor:
    """[R] -> [B] means over each sequence's tokens with mask 1; 0 for a sequence without any."""
    return sequence_sums(values, batch) / sequence_sums(torch.ones_like(values), batch).clamp(min=1)
