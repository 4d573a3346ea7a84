"""Raises an alarm when the log-probs of engine and trainer disagree by more than the bounds."""

from megatron_rft.config.sections import Faults
from megatron_rft.utils.errors import ConfigError, RunFailed

CAUSES = (
    "Causes: weights that did not arrive (faults.compare_weights_every=1 tells), an engine of lower precision "
    "(rollout.dtype), a sampler that the trainer does not replay. Truncated importance weights bear what remains"
)


def check_bounds(options: Faults, needs: frozenset[str]) -> None:
    """`needs`: the objective's `needs`."""
    if options.mismatch_max is not None and "old_logprobs" not in needs:
        raise ConfigError(
            "faults.mismatch_max: does nothing where a sampled batch gets one on-policy step: its training pass sums "
            "over tokens, and there is no pass before it. Leave it out, for mismatch_kl and mismatch_share, or set "
            "algorithm.mini_batch_prompts or algorithm.epochs"
        )


def check(metrics: dict[str, float], options: Faults, step: int) -> str | None:
    """The warning for a step whose mismatch exceeds its bounds; raises RunFailed if on_mismatch is "stop"."""
    bounds = {name: getattr(options, f"mismatch_{name}") for name in ("kl", "max", "share")}
    beyond = [
        f"mismatch/{name} {value:.3g} is above faults.mismatch_{name}, {bound:g}"
        for name, bound in bounds.items()
        if bound is not None and not (value := metrics.get(f"mismatch/{name}", 0.0)) <= bound
    ]
    if not beyond:
        return None
    told = f"step {step}: engine and trainer disagree on the same tokens: {'; '.join(beyond)}. {CAUSES}"
    if options.on_mismatch == "stop":
        raise RunFailed(told)
    return told
