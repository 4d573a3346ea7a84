"""What an algorithm is: which model outputs it needs, how it attributes credit, and its loss as sums.

The trainer knows nothing else. One step of it reads

    batch = model outputs named in `objective.needs`, added to the sampled batch
    updates, state = objective.prepare(batch, state)
    for update in updates: optimizer steps of update.model on update.batch, with update.loss

Losses are *sums with named denominators*. The trainer divides each by that count over the whole global mini-batch, so
that a gradient does not depend on how the mini-batch is cut into micro-batches, packed, or spread over ranks.

How the families fit: a critic is a second `Update` with model "critic" and outputs {"values"}; pairs share a `unit`;
refined responses join an update's batch, with a denominator of their own; a plug-in takes an objective and is one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rft.config.algorithms.ppo import Critic
from megatron_rft.config.sections import Section
from megatron_rft.records import Batch, like, segment_ids, send

State = dict[str, Tensor]  # flat, so that it goes into a safetensors file as it is
Outputs = dict[str, Tensor]  # what the model gave for a micro-batch: "logprobs", "entropy", "values" ..., each [R]


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
        return sum(weight * term.total / counts[term.per] for weight, term in self.terms.values())

    def logged(self) -> dict[str, Sum]:
        """Everything worth a line in the metrics: the terms (detached, unweighted) and the metrics."""
        return {name: Sum(term.total.detach(), term.per) for name, (_, term) in self.terms.items()} | self.metrics


LossFunction = Callable[[Outputs, Batch], Loss]


def trained_tokens(batch: Batch) -> Tensor:
    """[B] response tokens that count."""
    return torch.zeros(len(batch)).index_add_(0, batch.sequence_ids, batch.response_mask)


def counts(batch: Batch) -> dict[str, float]:
    """The denominators of a global mini-batch. At least 1 each: an empty one has sums of zero. What has no token that
    counts (an empty response, a group of them) is not counted."""
    trained = trained_tokens(batch)
    return {
        "response_tokens": max(trained.sum().item(), 1.0),
        "sequences": max((trained > 0).sum().item(), 1.0),
        "groups": max(len(batch.groups[trained > 0].unique()), 1.0),
        "units": max(len(batch.units.unique()), 1.0),
    }


@dataclass(frozen=True)
class SecondDistribution:
    """A second distribution q over the same response tokens, without a gradient, for losses that compare with one.

    weights: whose they are: the present "actor"'s own, the frozen "reference"'s, a moving-average "teacher"'s.
    in_context: q answers batch.context_ids instead of the prompts.
    extrapolation: lambda of "extrapolated_logprobs", those of softmax((1 + lambda) h - lambda h_q).

    `Update.outputs` may then name "other_logprobs" (of q), "extrapolated_logprobs", and with a gradient "reverse_kl",
    KL(pi || q), and "forward_kl", KL(q || pi), both exact sums over the vocabulary, each [R].
    """

    weights: str
    in_context: bool = False
    extrapolation: float = 0.0


@dataclass(frozen=True)
class Update:
    """Optimizer steps of one model on one batch: `epochs` passes over `mini_batches` parts of about equal size."""

    name: str  # "policy", "verification", "value": prefix of its metrics
    batch: Batch
    loss: LossFunction
    outputs: frozenset[str] = frozenset({"logprobs"})
    model: str = "actor"
    mini_batches: int = 1
    epochs: int = 1
    learning_rate: float | None = None  # None: the model's schedule, which then advances by one
    second: SecondDistribution | None = None
    counts: Callable[[Batch], dict[str, float]] = counts  # the denominators that `loss` names
    moments: str = "own"  # name of the optimizer's moments that the steps use: those of the model, or others kept apart
    scale: float = 1.0  # positive factor of loss and gradient, applied after the backward pass
    foreseen: bool = False  # but for `scale` it is the update of `Objective.foreseen`

    def steps(self) -> Iterator[Batch]:
        """The mini-batches in order, none of them empty. Sequences of one group stay together, as they were sampled.

        `group_tokens` [B] tells each sequence the trained tokens of its whole group, which no micro-batch can know.
        """
        _, group_of = self.batch.groups.unique(return_inverse=True)
        count = int(group_of.max()) + 1 if len(group_of) else 0
        trained = torch.zeros(count).index_add_(0, group_of, trained_tokens(self.batch))
        batch = self.batch.with_sequences(group_tokens=trained[group_of])
        for _ in range(self.epochs if count else 0):
            for part in torch.arange(count).tensor_split(min(self.mini_batches, count)):
                yield batch.select(torch.isin(group_of, part))


@dataclass(frozen=True)
class Prepared:
    updates: list[Update]
    state: State
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """What a run tells its algorithm, beside the algorithm's own options."""

    mini_batches: int = 1  # of a sampled batch, each an optimizer step
    max_response_tokens: int = 1  # the sampler's limit, which aggregation "constant" divides by
    critic: Critic | None = None


class Objective(ABC):
    """One algorithm. Its methods are pure: tensors in, tensors out, no process groups, the same on every rank.

    It is built from its section of the recipe: the type of `options` says which, and has the options' defaults.
    """

    options: Section

    def __init__(self, options: Section, setting: Setting = Setting()):
        self.options, self.setting = options, setting

    needs: frozenset[str] = frozenset()
    """What `prepare` finds in the batch, of "old_logprobs", "ref_logprobs", "ref_kl", "teacher_logprobs", "values",
    "refined_logprobs"; and "reference" where an update wants those weights beside."""

    def init(self) -> State:
        """The state before the first step; what `prepare` returns replaces it, and checkpoints carry it."""
        return {}

    def foreseen(self, state: State) -> Update | None:
        """An update of one mini-batch that `prepare` may return, as the first and with another scale, for the next
        batch. Its gradient can be computed while that batch is being generated."""
        return None

    def keep(self, batch: Batch) -> Tensor:
        """[B] bool: sequences worth training on. Groups left out may be replaced by sampling again (DAPO)."""
        return torch.ones(len(batch), dtype=torch.bool)

    @abstractmethod
    def prepare(self, batch: Batch, state: State) -> Prepared:
        """Attribute credit and say which updates to make."""


class PolicyObjective(Objective):
    """An online policy-gradient method, in the parts that a plug-in may use apart from each other."""

    attribution_needs: frozenset[str] = frozenset()  # of what `improvement_attributions` reads, beyond `needs`

    @abstractmethod
    def advantages(self, batch: Batch) -> Tensor:
        """[R] the local attribution of each response token."""

    @abstractmethod
    def surrogate(self, outputs: Outputs, batch: Batch) -> Loss:
        """The clipped objective alone (no KL, no bonus), on batch.tokens["advantages"] and ["old_logprobs"]. Advantages
        that are twice as large make it twice as large: PIPO multiplies its gradient by abs(phi)."""

    def taught(self, batch: Batch) -> Tensor:
        """[B] bool: the sequences that the policy's update has, which a plug-in should then remember."""
        return torch.ones(len(batch), dtype=torch.bool)

    def improvement_attributions(self, batch: Batch) -> Tensor:
        """[R] the attribution that PIPO scales (pipo.txt 4.1): the advantages, unless the method says otherwise."""
        return self.advantages(batch)


def sequence_sums(values: Tensor, batch: Batch) -> Tensor:
    """[R] -> [B] sums over each sequence's own (unmasked) tokens, differentiable."""
    ids = send(segment_ids(batch.response_lens), values.device)
    return values.new_zeros(len(batch)).index_add(0, ids, values * like(batch.response_mask, values))


def sequence_means(values: Tensor, batch: Batch) -> Tensor:
    """[R] -> [B] means over each sequence's own tokens; 0 for a sequence without any."""
    return sequence_sums(values, batch) / sequence_sums(torch.ones_like(values), batch).clamp(min=1)
