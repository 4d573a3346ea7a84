"""Train-inference mismatch: differences between the engine's and the trainer's log-probs of the same tokens."""

from torch import Tensor

from megatron_rft.objectives.base import Sum
from megatron_rft.objectives.surrogates import aggregate
from megatron_rft.records import Batch, like

BOUND = 0.1  # nats; mismatch/share counts tokens whose log-probs differ by more


def mismatch(rollout_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Over the response tokens: mismatch/kl, the k3 estimate of KL(engine || trainer); mismatch/max, the largest
    |difference| of log-probs; mismatch/share, the share of tokens whose difference exceeds BOUND. All inputs [R].
    """
    difference = (old_logprobs - rollout_logprobs).double()[mask > 0]
    if not len(difference):
        return {"mismatch/kl": 0.0, "mismatch/max": 0.0, "mismatch/share": 0.0}
    return {
        "mismatch/kl": (difference.expm1() - difference).mean().item(),
        "mismatch/max": difference.abs().max().item(),
        "mismatch/share": (difference.abs() > BOUND).double().mean().item(),
    }


def mismatch_sums(logprobs: Tensor, batch: Batch) -> dict[str, Sum]:
    """The same without the maximum, from an on-policy training pass: its log-probs are those before the step."""
    difference = logprobs.detach() - like(batch.tokens["rollout_logprobs"], logprobs)
    return {
        "mismatch/kl": aggregate(difference.expm1() - difference, batch, "token_mean"),
        "mismatch/share": aggregate((difference.abs() > BOUND).float(), batch, "token_mean"),
    }
