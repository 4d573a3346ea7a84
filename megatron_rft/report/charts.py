"""Defines the charts. A chart is shown if any run has its first metric. docs/metrics.md explains the metrics."""

import re
from dataclasses import dataclass

from megatron_rft.report.groups import RunGroup


@dataclass(frozen=True)
class Chart:
    """`note`: unit and meaning. `lines`: metrics; the first line is solid, then dashed, then dotted."""

    title: str
    note: str
    lines: list[str]
    log: bool = False
    floor: float | None = None  # start of the vertical axis

    @property
    def id(self) -> str:
        return re.sub("[^a-z_-]", "", self.title.lower().replace(" ", "_"))


REFINED = ["constraint/refined_reward", "constraint/original_reward"]
GRADIENTS = ["policy/grad_norm", "verification/grad_norm", "value/grad_norm"]
PARTS = ["constraint/grad_norm_base", "constraint/grad_norm_constraint"]
CLIPPED = ["policy/clip_fraction", "verification/clip_fraction"]
CHARTS = (
    Chart("Reward", "The verifier's, mean over all responses of a step.", ["reward/mean"]),
    Chart("Held-out accuracy", "On data.validation, with its standard error.", ["evaluation/pass@1"]),
    Chart("PIPO's improvement", "Standard deviations; below zero it rectifies.", ["pipo/xi", "pipo/phi"]),
    Chart("Refiner's improvement ratio", "Shares of all.", ["constraint/improved", "constraint/verbatim"], floor=0),
    Chart("Reward of refined responses", "And of the same responses as sampled.", REFINED),
    Chart("Cross entropy to refined responses", "Nats per token.", ["constraint/cross_entropy"], floor=0),
    Chart(
        "Groups without a signal",
        "Shares of groups; their advantages are zero.",
        ["reward/all_right_groups", "reward/all_wrong_groups"],
        floor=0,
    ),
    Chart("KL to the reference", "Nats per token.", ["policy/kl"], floor=0),
    Chart("KL outside of the loss", "To the reference, measured only; nats per token.", ["constraint/kl"], floor=0),
    Chart("Entropy", "Nats per token; at zero, exploration has ended.", ["policy/entropy"], floor=0),
    Chart("Response length", "Tokens.", ["response/length_mean", "response/length_max"], floor=0),
    Chart("Finished responses", "Share that ends with a stop token, not at the limit.", ["response/finished"]),
    Chart("Loss", "Per token or sequence.", ["policy/loss"]),
    Chart("Gradient norm", "L2, before clipping, of the policy, PIPO's verification, the critic.", GRADIENTS, floor=0),
    Chart("Gradient norms of the constraint's two terms", "L2.", PARTS, floor=0),
    Chart("Clipped tokens", "Share of tokens whose gradient is zero by clipping.", CLIPPED, floor=0),
    Chart("Engine against trainer", "Nats; should be rounding only.", ["mismatch/kl", "mismatch/max"], log=True),
    Chart("Critic", "Explained share of the returns' variance.", ["critic/explained_variance"]),
    Chart("Distillation", "KL of the policy to its teacher, nats.", ["policy/distillation"]),
    Chart(
        "Log-ratio of trajectories",
        "Policy to reference, nats.",
        ["dynamics/log_ratio_correct", "dynamics/log_ratio_incorrect"],
    ),
    Chart(
        "Weight of trajectories",
        "In the gradient: geometric mean probability.",
        ["dynamics/weight_correct", "dynamics/weight_incorrect"],
    ),
    Chart("Tokens per second", "Generated, of the whole step.", ["tokens/per_second"], floor=0),
    Chart("Model FLOPs utilisation", "Of the optimizer steps, share of the peak.", ["training/mfu"], floor=0),
    Chart(
        "Slowest rank",
        "Seconds of work in a step, without waits.",
        ["ranks/work_slowest", "ranks/work_median"],
        floor=0,
    ),
    Chart("Memory peak", "GiB, of rank 0.", ["memory/peak_gib"], floor=0),
)


def shown(groups: list[RunGroup]) -> list[Chart]:
    """Return the charts that have data. The loss is left out if there are rewards, because the loss of a policy
    gradient does not measure progress."""

    def has(name: str) -> bool:
        return any(group.has(name) for group in groups)

    charts = [chart for chart in CHARTS if has(chart.lines[0])]
    return [chart for chart in charts if not (chart.title == "Loss" and has("reward/mean"))]


def phases(groups: list[RunGroup]) -> list[str]:
    """Return the metrics of the phases of a step, sorted by their share of the time, the longest first."""
    total: dict[str, float] = {}
    for group in groups:
        names = sorted(name for name in group.metrics if name.startswith("seconds/") and name != "seconds/step")
        for run in group.runs:
            whole = sum(run.of("seconds/step")[1]) or 1.0
            for name in names:
                total[name] = total.get(name, 0.0) + sum(run.of(name)[1]) / whole
    return sorted(total, key=total.get, reverse=True)
