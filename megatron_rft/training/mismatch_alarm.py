"""Warns or stops the run if the train-inference mismatch exceeds its bounds."""

from megatron_rft.config.sections import Faults
from megatron_rft.utils.errors import ConfigError, RunFailed

CAUSES = (
    "Causes: weights that did not arrive (check with faults.compare_weights_every=1), an engine of lower precision "
    "(rollout.dtype), a sampler that the trainer does not replay. algorithm.importance=truncated corrects for the rest"
)


def check_bounds(options: Faults, needs: frozenset[str]) -> None:
    """Refuse faults.mismatch_max without `old_logprobs` among the objective's `needs`."""
    if options.mismatch_max is not None and "old_logprobs" not in needs:
        raise ConfigError(
            "faults.mismatch_max: does nothing where a sampled batch gets one on-policy step: the training pass only "
            "sums over tokens, and no pass comes before it. Use mismatch_kl and mismatch_share instead, or set "
            "algorithm.mini_batch_prompts or algorithm.epochs"
        )


def check(metrics: dict[str, float], options: Faults, step: int) -> str | None:
    """The warning if the step's mismatch exceeds a bound. Raises RunFailed instead if on_mismatch is "stop"."""
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
