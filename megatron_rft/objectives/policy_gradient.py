"""The base class of the online policy-gradient methods: the loss around a clipped surrogate.

    loss = surrogate + kl_coefficient KL(pi || ref) - entropy_coefficient H(pi), with the same aggregation

The KL may be a penalty on the reward instead, the KL before the step, without a gradient: on each token's reward in
methods that credit tokens, its sum on the response's in methods that compare responses. Some divide the reward by its
deviation in the group, but not the penalty: A_i = (R_i - mean) / std - (P_i - mean of P). Divided, a coefficient c
would weigh c / std, without a bound where the rewards are equal. So c means what it means in the loss, and does not
depend on the reward's scale.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from megatron_rft.config.algorithms import base as section
from megatron_rft.config.algorithms.online import DEFAULT, Setting
from megatron_rft.objectives import base, surrogates
from megatron_rft.objectives.advantages import group_centred, group_normalised, to_tokens
from megatron_rft.records import Batch, like
from megatron_rft.utils.errors import CodeError


class PolicyGradient(base.PolicyObjective):
    options: section.Clipped

    def __init__(self, options: section.Clipped, setting: Setting = DEFAULT):
        super().__init__(options, setting)
        self.estimator, self.exact = options.estimator, options.compares_distributions
        place = options.kl_in if options.kl_coefficient > 0 else None
        self.kl_in_loss, self.kl_in_reward = place == "loss", place == "reward"

    @property
    def needs(self) -> frozenset[str]:
        sampled = self.options.uses_reference and not self.exact
        several = self.setting.mini_batches * self.options.epochs > 1
        wanted = {"old_logprobs": several or self.kl_in_reward, "ref_logprobs": sampled, "reference": self.exact}
        return frozenset(name for name, needed in wanted.items() if needed)

    # ---- rewards

    def token_penalty(self, batch: Batch) -> Tensor:
        """[R] the penalty subtracted from each token's reward: the KL's and a plug-in's."""
        penalty = self.kl_penalty(batch)
        return penalty + batch.tokens["penalty"] if "penalty" in batch.tokens else penalty

    def kl_penalty(self, batch: Batch) -> Tensor:
        """[R] the KL's part of `token_penalty`."""
        if not self.kl_in_reward:
            return torch.zeros(len(batch.response_ids))
        return self.options.kl_coefficient * surrogates.k1(batch.tokens["old_logprobs"], batch.tokens["ref_logprobs"])

    def rewards(self, batch: Batch) -> Tensor:
        """[B] shaped rewards of whole responses; batch.sequences["rewards"] stays the verifier's."""
        return batch.shaped_rewards

    def penalties(self, batch: Batch) -> Tensor:
        """[B] sums of `token_penalty`."""
        return base.sequence_sums(self.token_penalty(batch), batch)

    # ---- the loss

    def clip(self, log_ratio: Tensor, batch: Batch, advantages: Tensor) -> surrogates.Clipped:
        """The surrogate's terms [R]. Methods with another ratio override this."""
        options = self.options
        low, high = options.clip_low, options.clip_high
        return surrogates.clipped_surrogate(log_ratio, advantages, low, high, options.dual_clip)

    def surrogate(self, outputs: base.Outputs, batch: Batch) -> base.Loss:
        logprobs = outputs["logprobs"]
        result = self.clip(surrogates.log_ratio(logprobs, batch), batch, like(batch.tokens["advantages"], logprobs))
        return self.aggregated(result, batch)

    def aggregated(self, result: surrogates.Clipped, batch: Batch) -> base.Loss:
        return surrogates.surrogate_loss(result, batch, self.options.aggregation, self.setting.max_response_tokens)

    def _importance(self, logprobs: Tensor, batch: Batch) -> Tensor:
        return surrogates.importance_weights(logprobs, batch, self.options.importance, self.options.importance_cap)

    def loss(self, outputs: base.Outputs, batch: Batch) -> base.Loss:
        logprobs, terms, metrics = outputs["logprobs"], {}, {}
        if self.options.importance != "none":
            weights = self._importance(logprobs, batch)
            batch = batch.with_tokens(advantages=like(batch.tokens["advantages"], weights) * weights)
            metrics["importance_mean"] = surrogates.aggregate(weights, batch, "token_mean")
        surrogate = self.surrogate(outputs, batch)
        if self.kl_in_loss:
            divergence = self._kl(outputs, batch)
            terms["kl_penalty"] = (self.options.kl_coefficient, self._aggregate(divergence, batch))
            metrics["kl"] = surrogates.aggregate(divergence.detach(), batch, "token_mean")
        if self.options.entropy_coefficient:
            terms["entropy_bonus"] = (-self.options.entropy_coefficient, self._aggregate(outputs["entropy"], batch))
        if "old_logprobs" not in batch.tokens:
            metrics |= surrogates.mismatch_sums(logprobs, batch)
        metrics["entropy"] = surrogates.aggregate(outputs["entropy"].detach(), batch, "token_mean")
        return base.Loss(surrogate.terms | terms, surrogate.metrics | metrics)

    def _kl(self, outputs: base.Outputs, batch: Batch) -> Tensor:
        if self.estimator == "exact":
            return outputs["reverse_kl"]
        logprobs = outputs["logprobs"]
        return surrogates.ESTIMATORS[self.estimator](logprobs, like(batch.tokens["ref_logprobs"], logprobs))

    def _aggregate(self, values: Tensor, batch: Batch) -> base.Sum:
        return surrogates.aggregate(values, batch, self.options.aggregation, self.setting.max_response_tokens)

    def _weighted(self, credit: Tensor, batch: Batch) -> Tensor:
        if self.options.importance == "none":
            return credit
        return credit * self._importance(batch.tokens["old_logprobs"], batch)

    def improvement_attributions(self, batch: Batch) -> Tensor:
        return self._weighted(self.advantages(batch), batch)

    # ---- the step

    def prepare(self, batch: Batch, state: base.State) -> base.Prepared:
        batch = batch.with_tokens(advantages=self.advantages(batch))
        return base.Prepared([self.policy_update(batch)], state, self.batch_metrics(batch))

    def policy_update(self, batch: Batch) -> base.Update:
        """The policy's update on a batch that contains advantages."""
        if not self.kl_in_loss and not self.options.entropy_coefficient and type(self).loss is PolicyGradient.loss:
            batch = batch.with_sequences(no_gradient=base.zero_sequences(batch.tokens["advantages"], batch))
        outputs = {"logprobs", "entropy"} | ({"reverse_kl"} if self.exact else set())
        second, idle = base.SecondDistribution("reference") if self.exact else None, not self.keep(batch).any()
        return self.update("policy", batch, self.loss, frozenset(outputs), second=second, idle=idle)

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        """KL metrics before the step. If no old_logprobs are computed, the engine's log-probs replace them."""
        metrics = {}
        if self.kl_in_reward:
            metrics["reward/kl_penalty"] = base.sequence_sums(self.kl_penalty(batch), batch).mean().item()
        if self.options.kl_coefficient and self.estimator == "k3":
            old = batch.tokens["old_logprobs" if "old_logprobs" in batch.tokens else "rollout_logprobs"]
            metrics["kl/largest"] = surrogates.largest_kl(old, batch.tokens["ref_logprobs"], batch.response_mask)
        return metrics


class GroupRelative(PolicyGradient):
    """Methods that compare the responses to one prompt and give each token the advantage of its response.

    Groups that `keep` leaves out have advantages of zero where they are in a batch all the same: as the last round of a
    step without other groups, or for their refined responses. Penalties and shaping alone give no credit.
    """

    @staticmethod
    @abstractmethod
    def relative(rewards: Tensor, group: Tensor) -> Tensor:
        """[B] advantages of responses within their groups."""

    centred = staticmethod(group_centred)  # the same without division by a deviation, for penalties

    def _relative(self, batch: Batch) -> Tensor:
        """[B] `relative` of the rewards. Another shape, of a user's class, would be broadcast."""
        credit, name = self.relative(self.rewards(batch), batch.groups), type(self).__name__
        if credit.shape != batch.groups.shape:
            raise CodeError(f"{name}.relative gave {credit.shape}: give a number for each of {len(batch)} responses")
        return credit

    def advantages(self, batch: Batch) -> Tensor:
        penalties = self.centred(self.penalties(batch), batch.groups, rounding=0.0)  # small ones count
        return to_tokens(torch.where(self.keep(batch), self._relative(batch) - penalties, 0.0), batch)

    def improvement_attributions(self, batch: Batch) -> Tensor:
        """Of the reward alone: normalised, penalties would weigh as much where rewards are equal."""
        credit = torch.where(self.keep(batch), self._relative(batch), 0.0)
        return self._weighted(to_tokens(group_normalised(credit, batch.groups), batch), batch)
