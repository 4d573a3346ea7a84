"""The dynamic constraint: the policy also learns a refiner's improved responses (dynamic_constraint.txt 3.2, 3.3).

    D = sum_{t=1}^{min(|a|, |a'|)} -log pi(a'_t | s0, a'_<t)     for pairs with r(s0, a') > r(s0, a)     Eq. 6

    mode loss      L = L_base + eta / N * sum of D over the pairs of the mini-batch, an SFT term on (s0, a'). N is the
                   number of sampled responses or of pairs (`per`)
    mode reward    eta * -log pi(a'_t | s0, a'_<t), of the policy before the step, is subtracted from the reward of
                   token t of a; methods that compare responses subtract its sum from the response's reward. No gradient

The sampler puts the pairs into `Batch.refined_ids`, empty for a response without one. In mode loss the refined
responses join the policy's mini-batches with the sampled ones of their group; the base's loss and counts exclude them.
Without pairs, or with eta 0, the base's updates are returned unchanged. The cross entropy of pairs is always logged.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from megatron_rft.config.algorithms.online import DEFAULT, Setting
from megatron_rft.config.constraint import DynamicOptions
from megatron_rft.objectives.base import (
    Loss,
    LossFunction,
    Outputs,
    Plugin,
    PolicyObjective,
    Prepared,
    State,
    Sum,
    Update,
    sequence_means,
    sequence_sums,
)
from megatron_rft.records import OPTIONAL, Batch, concatenate, offsets, segment_ids, send


def constrained_lens(batch: Batch) -> Tensor:
    """[B] the number of terms of D: min(|a|, |a'|), 0 for a response without a refined one."""
    assert batch.refined_lens is not None, "a batch without refined responses"
    return torch.minimum(batch.response_lens, batch.refined_lens)


def has_pairs(batch: Batch) -> bool:
    return batch.refined_lens is not None and bool(constrained_lens(batch).any())


def pairs(batch: Batch) -> Batch:
    """(s0, a') of every pair, with a' cut to the terms of D."""
    kept = batch.select(constrained_lens(batch) > 0)
    lens = constrained_lens(kept)
    assert kept.refined_ids is not None and kept.refined_lens is not None
    ids = kept.refined_ids[_first(kept.refined_lens, lens)]
    sequences = dict(kept.sequences)
    if "route" in sequences:
        sequences["route"] = torch.full((len(kept),), -1)  # another model wrote them
    return Batch(kept.prompt_ids, kept.prompt_lens, ids, lens, sequences=sequences)


def on_response_tokens(values: Tensor, batch: Batch) -> Tensor:
    """Values of the tokens of `pairs(batch)` -> [R]: the value of a'_t on token t of a, 0 on tokens without one."""
    full = values.new_zeros(len(batch.response_ids))
    full[_first(batch.response_lens, constrained_lens(batch))] = values
    return full


def _first(lens: Tensor, wanted: Tensor) -> Tensor:
    """A mask of the first `wanted` tokens of each segment. (3, 2), (1, 2) -> 1 0 0 1 1."""
    return offsets(lens) < wanted[segment_ids(lens)]


def joined(batch: Batch) -> Batch:
    """The sampled sequences followed by the pairs, which have `refined` 1 and response_mask 0."""
    refined = pairs(batch)
    sampled = replace(batch, **dict.fromkeys(OPTIONAL)).with_tokens(response_mask=batch.response_mask)
    tokens = {name: value.new_zeros(len(refined.response_ids)) for name, value in sampled.tokens.items()}
    refined = refined.with_tokens(**tokens, refined_mask=torch.ones(len(refined.response_ids)))
    if "no_gradient" in refined.sequences:
        refined = refined.with_sequences(no_gradient=torch.zeros(len(refined), dtype=torch.bool))
    sampled = sampled.with_tokens(refined_mask=torch.zeros(len(sampled.response_ids)))
    both = enumerate((sampled, refined))
    return concatenate([each.with_sequences(refined=torch.full((len(each),), i)) for i, each in both])


def sampled_only(batch: Batch) -> tuple[Batch, Tensor]:
    """The sampled sequences of a joined batch, and the positions of their response tokens."""
    sampled = batch.sequences["refined"] == 0
    return batch.select(sampled), sampled[batch.sequence_ids].nonzero().flatten()


def pair_terms(logprobs: Tensor, batch: Batch, how: str) -> Tensor:
    """[B] D of each pair of a joined batch, for `how` mean divided by its number of terms; 0 for sampled sequences."""
    refined = batch.with_tokens(response_mask=batch.tokens["refined_mask"])
    return {"sum": sequence_sums, "mean": sequence_means}[how](-logprobs, refined)


def part_of(loss: LossFunction, part: str) -> LossFunction:
    """The loss with only the terms of `part`: "constraint", or "base" for all others."""

    def only(outputs: Outputs, batch: Batch) -> Loss:
        whole = loss(outputs, batch)
        kept = {k: v for k, v in whole.terms.items() if (k == "constraint") == (part == "constraint")}
        return replace(whole, terms=kept)

    return only


PARTS = {f"constraint/grad_norm_{part}": partial(part_of, part=part) for part in ("base", "constraint")}


class DynamicConstraint(Plugin):
    options: DynamicOptions

    def __init__(self, base: PolicyObjective, options: DynamicOptions, setting: Setting = DEFAULT):
        super().__init__(base, options, setting)
        self.eta, self.mode = options.eta, (options.mode or "loss") if options.eta else None  # None: only measures

    @property
    def needs(self) -> frozenset[str]:
        return self.base.needs if self.mode == "loss" else self.base.needs | {"refined_logprobs"}

    def keep(self, batch: Batch) -> Tensor:
        """The base's choice; with `agreeing`, also the groups with a pair."""
        kept = self.base.keep(batch)
        if not self.options.agreeing or not has_pairs(batch):
            return kept
        return kept | torch.isin(batch.groups, batch.groups[constrained_lens(batch) > 0])

    def trained(self, batch: Batch) -> Tensor:
        return self.base.trained(batch) & self.base.keep(batch)

    def advantages(self, batch: Batch) -> Tensor:
        return self.base.advantages(self._penalised(batch))

    def improvement_attributions(self, batch: Batch) -> Tensor:
        return self.base.improvement_attributions(self._penalised(batch))

    def prepare(self, batch: Batch, state: State) -> Prepared:
        if not has_pairs(batch):
            return self.base.prepare(batch, state)
        if self.mode != "loss":
            penalised = self._penalised(batch)
            prepared = self.base.prepare(penalised, state)
            entropies = -batch.tokens["refined_logprobs"].double().sum() / constrained_lens(batch).sum()
            metrics = {"constraint/cross_entropy": entropies.item()}
            if "penalty" in penalised.tokens:
                metrics["reward/constraint_penalty"] = penalised.tokens["penalty"].sum().item() / len(batch)
            return replace(prepared, metrics=prepared.metrics | metrics)
        kept, of_base = self.base.keep(batch), batch
        if kept.any():  # mask 0 on groups that the base leaves out, if it keeps others: its loss counts none
            of_base = batch.with_tokens(response_mask=batch.response_mask * kept[batch.sequence_ids])
        prepared = self.base.prepare(of_base, state)
        updates = [self._constrained(update) if update.model == "actor" else update for update in prepared.updates]
        return replace(prepared, updates=updates)

    def _penalised(self, batch: Batch) -> Batch:
        """In mode reward: the batch with tokens["penalty"] [R]."""
        if self.mode != "reward" or not has_pairs(batch) or "penalty" in batch.tokens:
            return batch
        penalty = -self.eta * batch.tokens["refined_logprobs"]
        if self.options.tokens == "mean":
            penalty = penalty / constrained_lens(batch).clamp(min=1)[batch.sequence_ids]
        return batch.with_tokens(penalty=penalty)

    def _constrained(self, update: Update) -> Update:
        batch = joined(update.batch)
        each_step = int(batch.tokens["refined_mask"].sum()) / min(update.mini_batches, len(batch.groups.unique()))

        def counts(mini_batch: Batch) -> dict[str, float]:
            sampled, refined = sampled_only(mini_batch)[0], mini_batch.sequences["refined"] == 1
            constrained = sampled.response_lens > 0 if self.options.per == "responses" else refined
            own = {"constrained": max(float(constrained.sum()), 1.0), "refined_tokens": each_step}
            # refined_tokens is the mean per mini-batch, so one without pairs does not lower the step's cross-entropy
            return update.counts(sampled) | own

        return replace(update, batch=batch, loss=self._with_constraint(update.loss), counts=counts, parts=PARTS)

    def _with_constraint(self, base_loss: LossFunction) -> LossFunction:
        def loss(outputs: Outputs, batch: Batch) -> Loss:
            sampled, positions = sampled_only(batch)
            own = {name: value.index_select(0, send(positions, value.device)) for name, value in outputs.items()}
            base = base_loss(own, sampled)
            terms = pair_terms(outputs["logprobs"], batch, self.options.tokens)
            total = pair_terms(outputs["logprobs"].detach(), batch, "sum").sum()
            return Loss(
                base.terms | {"constraint": (self.eta, Sum(terms.sum(), "constrained"))},
                base.metrics | {"constraint/cross_entropy": Sum(total, "refined_tokens")},
            )

        return loss
