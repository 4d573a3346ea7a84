"""PPO and its critic."""

from typing import ClassVar, Literal

from megatron_rft.config.algorithms.base import Clipped, KLEstimator, KLPlace
from megatron_rft.config.sections import Natural, NonNegative, Positive, Section, ShareOrAll


class PPO(Clipped):
    """The critic has a separate section."""

    needs_critic: ClassVar[bool] = True

    name: Literal["ppo"] = "ppo"
    kl_estimator: KLEstimator = "k1"
    kl_in: KLPlace = "reward"
    gamma: ShareOrAll = 1.0
    """Discount per token."""
    lam: ShareOrAll = 0.95
    """lambda of generalised advantage estimation: 0 relies on the critic, 1 on the rewards."""
    whiten_rewards: bool = False
    """Normalise rewards to mean 0 and standard deviation 1 over the sampled batch."""
    whiten_advantages: bool = True
    """The same for the advantages of all tokens."""


class Critic(Section):
    """PPO's value model: the policy's architecture with a value head. The other options of `optimizer`, and `megatron`
    and `batching`, apply to both."""

    path: str | None = None
    """Folder or hub name of the initial weights. None: the policy's."""
    lr: Positive
    """Learning rate after the warmup."""
    lr_warmup_steps: Natural = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    clip_grad: NonNegative = 1.0
    """Maximum norm of the whole gradient; 0 does not clip."""
    value_clip: Positive | None = 0.2
    """Clip a value's change since sampling to this much in the loss. null: no clip."""
    warmup_steps: Natural = 0
    """Training steps at the start in which only the critic is updated."""
