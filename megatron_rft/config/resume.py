"""Decides whether a run may be resumed with a changed recipe."""

import re
from fnmatch import fnmatch
from typing import Any

from megatron_rft.config.messages import shown
from megatron_rft.config.recipe import Recipe

# Options that change neither the results of a step (beyond rounding) nor the steps done so far.
# fmt: off
FREE = (
    "run.steps", "run.epochs", "run.resume", "run.output_dir", "run.name", "run.access", "tracking.*", "checkpoint.*",
    "evaluation.every", "evaluation.patience", "evaluation.batch", "evaluation.benchmarks*", "faults.*", "batching.*",
    "megatron.*parallel*", "megatron.*pipeline*", "megatron.recompute_*", "megatron.overlap_*", "megatron.*offload*",
    "megatron.*fusion", "megatron.attention_backend", "megatron.moe_token_dispatcher_type", "megatron.*deepep*",
    "megatron.bucket_size", "megatron.cp_comm_type", "megatron.distribute_saved_activations", "optimizer.overlap*",
    "optimizer.pin_cpu_*", "data.test*", "rollout.engine", "rollout.placement", "rollout.processes", "rollout.servers",
    "rollout.max_batch_sequences", "rollout.reserve_gib", "rollout.offload_trainer", "vllm.*parallel*", "vllm.*memory*",
    "reward.workers", "reward.timeout_s", "environment.processes", "environment.*_timeout_s", "environment.programs",
    "environment.host",
)
REPORTING = ("data.validation*", "evaluation.*")  # free, except offline: there they choose the best model
# fmt: on
DIGEST = re.compile(r"(session:\w+)@\w+")  # of a session's code, which another session has to give again


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"run": {"seed": 0}} -> {"run.seed": 0}."""
    items: dict[str, Any] = {}
    for name, value in section.items():
        items |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return items


def difference(old: Recipe, new: Recipe) -> list[str]:
    """One line for each changed option that makes `new` a different run than `old`."""
    before, after = flat(old.model_dump()), flat(new.model_dump())
    lines, free = [], FREE if new.trainer == "offline" else FREE + REPORTING
    for key in sorted(before.keys() | after.keys()):
        there, now = before.get(key), after.get(key)
        same = there == now or DIGEST.sub(r"\1", repr(there)) == DIGEST.sub(r"\1", repr(now))
        if not (same or any(fnmatch(key, pattern) for pattern in free)):
            lines.append(f"{key}: {shown(there)} there, {shown(now)} now")
    return lines + _schedule(old, new)


def _schedule(old: Recipe, new: Recipe) -> list[str]:
    """One line for a changed length of the run that changes the learning rate's schedule."""
    if new.optimizer.lr_decay_style == "constant" or new.optimizer.lr_decay_steps or old.optimizer.lr_decay_steps:
        return []
    return [
        f"run.{key}: {getattr(old.run, key)} there, {getattr(new.run, key)} now, and the learning rate decays over the "
        "whole run: set optimizer.lr_decay_steps at the start of a run that you may prolong"
        for key in ("steps", "epochs")
        if getattr(old.run, key) != getattr(new.run, key)
    ]
