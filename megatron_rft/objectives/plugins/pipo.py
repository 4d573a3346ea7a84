"""PIPO verifies the previous update by the change of the reward, then reinforces or rectifies it (pipo.txt 4).

At step t, with mu_t the mean verifier reward of everything just sampled,

    xi_t  = (mu_t - mean(mu_{t-K..t-1})) / std(mu_{t-K..t-1})           Eq. 8, 9: std with K-1
    phi   = xi if xi >= 0 else rectification * xi                       Def. 4.1
    r_PI  = a_{t-1} * phi(xi_t)                                         Eq. 10
    J_PI  = mean of min(nu r_PI, clip(nu) r_PI) over B_{t-1}            Eq. 11

and, once K means are known, one optimizer step on J_PI precedes the base algorithm's step. a_{t-1} are the base's
attributions of the previous batch (of the responses that the base trained on); nu is the base's ratio to the policy
that sampled that batch. The base's dual_clip and importance weights, which Eq. 11 lacks, apply here too.

J_PI is abs(phi) times the surrogate of sign(phi) a_{t-1}. For phi > 0 this surrogate depends only on the previous batch
and the current weights, so `foreseen` returns it before mu_t is known. For phi < 0 the clip bounds the other side.

No step is made if phi is zero (also if mu_t equals the window's mean, or its std is zero, both up to rounding) or if
every attribution is zero: Adam's momentum would move the weights even with a zero gradient. A step in which the base
does not update the policy (PPO's critic warm-up) is not stored: there is nothing to verify.

With `staleness` n > 0, responses of batch t come from weights up to n steps older than the policy, possibly of several
versions. Let v be the oldest version with which any response of the batch began. The update that made v is the newest
one that affected the whole batch, so mu_t verifies that update, with nu relative to the policy before the step on B_v.
The last n + 1 batches are stored; with n = 0, B_v is B_{t-1}. A batch that no update has affected verifies nothing.
"""

import math

import torch
from torch import Tensor

from megatron_rft.config import plugins as section
from megatron_rft.config.algorithms.online import DEFAULT, Setting
from megatron_rft.objectives.base import Plugin, PolicyObjective, Prepared, State, Update, zero_sequences
from megatron_rft.records import Batch

KEPT_TOKENS = {"old_logprobs", "attributions", "response_mask"}  # of the previous batch
KEPT_SEQUENCES = {"group", "unit", "route"}
ROUNDING = 1e-12  # relative; equal means that were summed in another order differ by about 1e-16


def anchor(window: Tensor) -> tuple[float, float]:
    """Mean and std (with K - 1) of the window's means, from exact sums; NaN if a value is not finite or K is 1."""
    values = window.tolist()
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan, math.nan
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def improvement(mu: float, window: Tensor, bound: float) -> float:
    """xi of Eq. 9, clipped to [-bound, bound]; 0 if the difference or the std is only rounding, or a value is not
    finite."""
    mean, std = anchor(window)
    rounding = ROUNDING * max(1.0, abs(mu))
    if not math.isfinite(mu - mean) or abs(mu - mean) <= rounding or std <= rounding:
        return 0.0
    return max(-bound, min(bound, (mu - mean) / std))


def verified_batch(batch: Batch, kept: list[Batch]) -> Batch | None:
    """The stored batch whose update made the oldest weights that sampled `batch`, or None."""
    seen = batch.scalars.get("oldest_version", math.inf)  # without it the batch is on-policy
    return next((each for each in reversed(kept) if each.scalars.get("step", 0.0) <= seen), None)


def _kept(state: State) -> list[Batch]:
    """The stored batches, the newest last."""
    count = len({name.split(".")[1] for name in state if name.startswith("previous.")})
    return [Batch.from_state_dict(state, f"previous.{i}.") for i in range(count)]


class PIPO(Plugin):
    options: section.PIPO

    def __init__(self, base: PolicyObjective, options: section.PIPO, setting: Setting = DEFAULT):
        super().__init__(base, options, setting)
        self.only_ours = setting.recomputes and "old_logprobs" not in base.needs

    @property
    def needs(self) -> frozenset[str]:
        return self.base.needs | self.base.attribution_needs | {"old_logprobs"}

    def init(self) -> State:
        return {"mu": torch.zeros(0, dtype=torch.float64)} | {f"base.{k}": v for k, v in self.base.init().items()}

    def foreseen(self, state: State) -> Update | None:
        """The verification that the next `prepare` returns if phi > 0, apart from its scale; None if it returns none.
        It has one mini-batch."""
        kept = _kept(state)
        ready = kept and len(state["mu"]) >= self.options.window
        return self._verification(kept[-1], 1.0) if ready else None

    def prepare(self, batch: Batch, state: State) -> Prepared:
        mu = batch.scalars["sampled_reward_sum"] / batch.scalars["sampled_count"]
        kept = _kept(state)
        update, metrics = self._verify(mu, state, verified_batch(batch, kept))
        updates = [] if update is None else [update]
        # Without a verification step, the base computes exactly what it computes without this plug-in.
        hidden = self.only_ours and not updates
        of_base = {k.removeprefix("base."): v for k, v in state.items() if k.startswith("base.")}
        base = self.base.prepare(batch.without_tokens("old_logprobs") if hidden else batch, of_base)
        base_state = {f"base.{k}": v for k, v in base.state.items()}
        if all(update.model != "actor" for update in base.updates):
            return Prepared(base.updates, state | base_state, base.metrics | {"pipo/mu": mu})
        previous = batch.with_tokens(attributions=self.improvement_attributions(batch))
        previous = previous.only(KEPT_TOKENS, KEPT_SEQUENCES).select(self.base.trained(batch))
        memory = torch.cat([state["mu"], torch.tensor([mu], dtype=torch.float64)])[-self.options.window :]
        state = {"mu": memory} | base_state
        for i, each in enumerate([*kept, previous][-self.setting.staleness - 1 :]):
            state |= each.state_dict(f"previous.{i}.")
        return Prepared([*updates, *base.updates], state, base.metrics | metrics)

    def _verify(self, mu: float, state: State, previous: Batch | None) -> tuple[Update | None, dict[str, float]]:
        """The update on the previous batch, or None, and its metrics."""
        if len(state["mu"]) < self.options.window:
            return None, {"pipo/mu": mu}
        xi, (mean, std) = improvement(mu, state["mu"], self.options.xi_max), anchor(state["mu"])
        phi = xi if xi >= 0 else self.options.rectification * xi
        update = None if previous is None else self._verification(previous, phi)
        metrics = {
            "pipo/mu": mu,
            "pipo/anchor_mean": mean,
            "pipo/anchor_std": std,
            "pipo/xi": xi,
            "pipo/phi": phi,
            "pipo/reinforced": float(update is not None and phi > 0),
            "pipo/suppressed": float(update is not None and phi < 0),
            "pipo/skipped": float(update is None),
        }
        return update, metrics

    def _verification(self, previous: Batch, phi: float) -> Update | None:
        """The update on J_PI of a previous batch; None if phi or every attribution is zero."""
        attributions = previous.tokens["attributions"]
        if not phi or not attributions.any():
            return None
        batch = previous.with_tokens(advantages=attributions if phi > 0 else -attributions)
        batch = batch.with_sequences(no_gradient=zero_sequences(attributions, batch))
        moments = "own" if self.options.optimizer_state == "shared" else "verification"
        rate = self.options.learning_rate
        return Update("verification", batch, self.surrogate, learning_rate=rate, moments=moments, scale=abs(phi))
