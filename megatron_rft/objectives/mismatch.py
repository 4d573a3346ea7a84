"""How far the engine that sampled and the trainer that learns disagree on the same tokens under the same weights."""

from torch import Tensor


def mismatch(rollout_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, bound: float = 0.1) -> dict[str, float]:
    """Over the response tokens: mismatch/kl, the k3 estimate of KL(engine || trainer); mismatch/max, the largest
    |difference| of log-probs; mismatch/share, the share of tokens whose difference exceeds `bound`. All inputs [R].
    """
    difference = (old_logprobs - rollout_logprobs).double()[mask > 0]
    if not len(difference):
        return {"mismatch/kl": 0.0, "mismatch/max": 0.0, "mismatch/share": 0.0}
    return {
        "mismatch/kl": (difference.expm1() - difference).mean().item(),
        "mismatch/max": difference.abs().max().item(),
        "mismatch/share": (difference.abs() > bound).double().mean().item(),
    }
