"""PPO: a critic's values, generalised advantage estimation, clipped policy and value losses (pipo.txt 2, Eq. 2, A.2).

    r_t = -kl_coefficient (log pi_old - log pi_ref)_t + [t is the last token] R + [t is the last token of a turn] R_turn
    A = GAE(r, V), whitened over the batch;   returns = A (before whitening) + V
    value loss = 0.5 max((V - returns)^2, (clip(V, V_old +- value_clip) - returns)^2), token mean

In the first `critic.warmup_steps` steps only the critic is updated.
"""

import torch
from torch import Tensor

from megatron_rft.config.algorithms import online as section
from megatron_rft.objectives.advantages import at_turn_ends, gae, whiten, without_turns
from megatron_rft.objectives.base import Loss, Outputs, Prepared, State, Sum
from megatron_rft.objectives.policy_gradient import PolicyGradient
from megatron_rft.objectives.surrogates import aggregate
from megatron_rft.records import Batch, like


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """[R] 0.5 max((V - R)^2, (clip(V, V_old +- clip) - R)^2); the first alone if clip is 0. (2, 1, 0, 0.5): 2."""
    loss = (values - returns) ** 2
    if clip:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        loss = torch.maximum(loss, (bounded - returns) ** 2)
    return 0.5 * loss


class PPO(PolicyGradient):
    options: section.PPO

    @property
    def critic(self) -> section.Critic:
        assert self.setting.critic is not None, "ppo has a critic"
        return self.setting.critic

    @property
    def needs(self) -> frozenset[str]:
        return super().needs | {"values"}

    def init(self) -> State:
        return {"steps": torch.zeros((), dtype=torch.int64)}

    def advantages(self, batch: Batch) -> Tensor:
        return self._credit(batch)[0]

    def prepare(self, batch: Batch, state: State) -> Prepared:
        advantages, returns = self._credit(batch)
        batch = batch.with_tokens(advantages=advantages, returns=returns)
        updates = [self.update("value", batch, self.value_loss, frozenset({"values"}), model="critic")]
        if state["steps"] >= self.critic.warmup_steps:
            updates.append(self.policy_update(batch))
        return Prepared(updates, {"steps": state["steps"] + 1}, self.batch_metrics(batch))

    def batch_metrics(self, batch: Batch) -> dict[str, float]:
        own = batch.response_mask > 0
        values, returns = batch.tokens["values"][own].double(), batch.tokens["returns"][own].double()
        if len(values) == 0:
            return super().batch_metrics(batch)
        spread = returns.var(correction=0)
        explained = 1 - (returns - values).var(correction=0) / spread if spread > 0 else torch.zeros(())
        named = {"mean": values.mean(), "returns": returns.mean(), "explained_variance": explained}
        return super().batch_metrics(batch) | {f"critic/{name}": value.item() for name, value in named.items()}

    def _credit(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """[R] advantages and returns."""
        rewards = without_turns(batch.shaped_rewards, batch)
        if self.options.whiten_rewards:
            rewards = whiten(rewards, torch.ones_like(rewards))
        rewards = at_turn_ends(rewards, batch) - self.token_penalty(batch)
        advantages, returns = gae(rewards, batch.tokens["values"], batch, self.options.gamma, self.options.lam)
        if self.options.whiten_advantages:
            advantages = whiten(advantages, batch.response_mask)
        return advantages, returns

    def value_loss(self, outputs: Outputs, batch: Batch) -> Loss:
        values, clip = outputs["values"], self.critic.value_clip
        old_values, returns = like(batch.tokens["values"], values), like(batch.tokens["returns"], values)
        terms = value_loss(values, old_values, returns, clip)
        clipped = ((values.detach() - old_values).abs() > (clip or torch.inf)).to(values)
        metrics: dict[str, Sum] = {"clip_fraction": aggregate(clipped, batch, "token_mean")}
        return Loss({"value_loss": (1.0, aggregate(terms, batch, "token_mean"))}, metrics)
