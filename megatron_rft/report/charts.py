"""Defines the charts. A chart is shown if any run has its first metric. docs/metrics.md explains the metrics."""

import re
from dataclasses import dataclass

from megatron_rft.report.groups import RunGroup


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str  # of the vertical axis
    note: str  # explains the chart
    lines: dict[str, str]  # metric -> label; the first line is solid, then dashed, then dotted: colours tell runs apart
    log: bool = False
    floor: float | None = None  # start of the vertical axis

    @property
    def id(self) -> str:
        return re.sub("[^a-z_-]", "", self.title.lower().replace(" ", "_"))


CHARTS = (
    Chart("Reward", "verifier's reward", "Mean over all responses sampled in a step.", {"reward/mean": "mean"}),
    Chart(
        "Held-out accuracy",
        "pass@1",
        "On data.validation. The band is the standard error over seeds, or over samples if there is one seed.",
        {"evaluation/pass@1": "pass@1"},
    ),
    Chart(
        "PIPO's improvement",
        "standard deviations",
        "xi compares the mean reward with the last K means. Above zero, PIPO reinforces the previous update by "
        "phi = xi; below zero, it rectifies it by a smaller phi.",
        {"pipo/xi": "ξ", "pipo/phi": "φ(ξ)"},
    ),
    Chart(
        "Refiner's improvement ratio",
        "share of responses",
        "Share of responses whose refined version scores higher, and share of refinements that are verbatim copies.",
        {"constraint/improved": "improved", "constraint/verbatim": "copied as it was"},
        floor=0,
    ),
    Chart(
        "Reward of refined responses",
        "verifier's reward",
        "Mean reward of the refined responses, and of the same responses as sampled.",
        {"constraint/refined_reward": "refined", "constraint/original_reward": "as sampled"},
    ),
    Chart(
        "Cross entropy to refined responses",
        "nats per token",
        "Cross entropy of the policy on the refined responses: how unlikely they are to the policy.",
        {"constraint/cross_entropy": "cross entropy"},
        floor=0,
    ),
    Chart(
        "Groups without a signal",
        "share of groups",
        "Groups whose responses are all right or all wrong: their advantages are zero.",
        {"reward/all_right_groups": "all right", "reward/all_wrong_groups": "all wrong"},
        floor=0,
    ),
    Chart("KL to the reference", "nats per token", "How far the policy has moved.", {"policy/kl": "KL"}, floor=0),
    Chart(
        "KL outside of the loss",
        "nats per token",
        "KL to the reference, measured but not part of the loss.",
        {"constraint/kl": "KL"},
        floor=0,
    ),
    Chart(
        "Entropy",
        "nats per token",
        "Entropy of the policy. If it falls to zero, exploration has ended.",
        {"policy/entropy": "entropy"},
        floor=0,
    ),
    Chart(
        "Response length",
        "tokens",
        "Mean and longest response of a step.",
        {"response/length_mean": "mean", "response/length_max": "longest"},
        floor=0,
    ),
    Chart(
        "Finished responses",
        "share of responses",
        "Responses that ended with a stop token, not at the length limit.",
        {"response/finished": "finished"},
    ),
    Chart("Loss", "per token or sequence", "The loss that is minimised.", {"policy/loss": "loss"}),
    Chart(
        "Gradient norm",
        "L2, before clipping",
        "Gradient norms of the policy's steps, of PIPO's verification and of the critic's steps.",
        {"policy/grad_norm": "policy", "verification/grad_norm": "verification", "value/grad_norm": "critic"},
        floor=0,
    ),
    Chart(
        "Gradient norms of the constraint's two terms",
        "L2, before clipping",
        "Gradient norms of the algorithm's part of the loss, and of the constraint's part.",
        {"constraint/grad_norm_base": "algorithm", "constraint/grad_norm_constraint": "constraint"},
        floor=0,
    ),
    Chart(
        "Clipped tokens",
        "share of tokens",
        "Share of tokens whose gradient is set to zero by clipping.",
        {"policy/clip_fraction": "policy", "verification/clip_fraction": "verification"},
        floor=0,
    ),
    Chart(
        "Engine against trainer",
        "nats",
        "Log-probs of the same tokens with the same weights, which should differ by rounding only: KL per token, and "
        "the largest difference.",
        {"mismatch/kl": "KL", "mismatch/max": "largest"},
        log=True,
    ),
    Chart(
        "Critic",
        "share",
        "Explained variance of the returns: 1 is a perfect critic, 0 is as good as predicting the mean.",
        {"critic/explained_variance": "explained variance"},
    ),
    Chart(
        "Distillation",
        "nats",
        "KL of the policy to its teacher, which sees the feedback.",
        {"policy/distillation": "KL"},
    ),
    Chart(
        "Log-ratio of trajectories",
        "nats per trajectory",
        "Log-ratio of policy to reference on right and on wrong trajectories.",
        {"dynamics/log_ratio_correct": "right", "dynamics/log_ratio_incorrect": "wrong"},
    ),
    Chart(
        "Weight of trajectories",
        "geometric mean probability",
        "The weight of right and of wrong trajectories in the gradient.",
        {"dynamics/weight_correct": "right", "dynamics/weight_incorrect": "wrong"},
    ),
    Chart(
        "Tokens per second",
        "tokens/s",
        "Generated tokens per second of the whole step.",
        {"tokens/per_second": "generated"},
        floor=0,
    ),
    Chart(
        "Model FLOPs utilisation",
        "share of the peak",
        "MFU of the optimizer steps, on GPUs with a known peak.",
        {"training/mfu": "MFU"},
        floor=0,
    ),
    Chart(
        "Slowest rank",
        "seconds per step",
        "Seconds that the slowest rank and the median rank work, without waits for other ranks. The page's head names "
        "a rank that is often slow.",
        {"ranks/work_slowest": "slowest", "ranks/work_median": "median"},
        floor=0,
    ),
    Chart("Memory peak", "GiB", "Peak memory of rank 0.", {"memory/peak_gib": "peak"}, floor=0),
)


def shown(groups: list[RunGroup]) -> list[Chart]:
    """Return the charts that have data. The loss is left out if there are rewards, because the loss of a policy
    gradient does not measure progress."""

    def has(name: str) -> bool:
        return any(group.has(name) for group in groups)

    charts = [chart for chart in CHARTS if has(next(iter(chart.lines)))]
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
