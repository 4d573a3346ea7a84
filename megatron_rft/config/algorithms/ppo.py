"""PPO, and its critic."""

from typing import ClassVar, Literal

from megatron_rft.config.algorithms.base import Clipped, KLEstimator, KLPlace
from megatron_rft.config.sections import Natural, NonNegative, Positive, Section, ShareOrAll


class PPO(Clipped):
    """Its critic has a section of its own."""

    needs_critic: ClassVar[bool] = True

    name: Literal["ppo"] = "ppo"
    kl_estimator: KLEstimator = "k1"
    kl_in: KLPlace = "reward"
    gamma: ShareOrAll = 1.0
    """Discount per token."""
    lam: ShareOrAll = 0.95
    """Of generalised advantage estimation: 0 trusts the critic, 1 the rewards."""
    whiten_rewards: bool = False
    """Mean 0 and standard deviation 1 over the sampled batch."""
    whiten_advantages: bool = True
    """The same for the advantages of all tokens."""


class Critic(Section):
    """PPO's value model: the architecture of the policy with a value head, in the same parallel layout. What is not
    here is the policy's: the rest of `optimizer`, `megatron`, `batching`."""

    path: str | None = None
    """Folder or hub name of the weights that it starts from. None: the policy's."""
    lr: Positive
    """Learning rate after the warmup."""
    lr_warmup_steps: Natural = 0
    """Optimizer steps over which the rate rises linearly from 0."""
    clip_grad: NonNegative = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""
    value_clip: Positive | None = 0.2
    """A value moves at most so far from that of the sampled batch before the loss stops following. null: without."""
    warmup_steps: Natural = 0
    """Training steps at the start in which the critic alone learns."""
