"""The list of charts. A chart is shown when any run has its first metric. docs/metrics.md explains the metrics."""

import re
from dataclasses import dataclass

from megatron_rft.report.groups import Group


@dataclass(frozen=True)
class Line:
    """`dash`: solid, dashed or dotted; colours tell runs apart."""

    metric: str
    label: str
    dash: str = "solid"


@dataclass(frozen=True)
class Chart:
    title: str
    unit: str  # of the vertical axis
    note: str  # how to read it
    lines: tuple[Line, ...]
    log: bool = False
    floor: float | None = None  # the vertical axis begins here

    @property
    def id(self) -> str:
        return re.sub("[^a-z_-]", "", self.title.lower().replace(" ", "_"))


def chart(title: str, unit: str, note: str, *lines: tuple[str, str], **rest) -> Chart:
    """`lines` are (metric, label): the first solid, then dashed, then dotted."""
    dashes = ("solid", "dashed", "dotted")
    return Chart(title, unit, note, tuple(Line(*line, dash) for line, dash in zip(lines, dashes, strict=False)), **rest)


CHARTS = (
    chart("Reward", "verifier's reward", "Mean over all responses sampled in a step.", ("reward/mean", "mean")),
    chart(
        "Held-out accuracy",
        "pass@1",
        "On data.validation. The band is the standard error: of the seeds, or of the sampling where there is one seed.",
        ("evaluation/pass@1", "pass@1"),
    ),
    chart(
        "PIPO's improvement",
        "standard deviations",
        "xi: the mean reward against the last K means. Above zero the previous update is reinforced by phi = xi, "
        "below it is rectified by a smaller phi.",
        ("pipo/xi", "ξ"),
        ("pipo/phi", "φ(ξ)"),
    ),
    chart(
        "Refiner's improvement ratio",
        "share of responses",
        "How often the refined response scores higher than the one it was made of; of refinements, verbatim copies.",
        ("constraint/improved", "improved"),
        ("constraint/verbatim", "copied as it was"),
        floor=0,
    ),
    chart(
        "Reward of refined responses",
        "verifier's reward",
        "Of the responses that were refined, after it and before.",
        ("constraint/refined_reward", "refined"),
        ("constraint/original_reward", "as sampled"),
    ),
    chart(
        "Cross entropy to refined responses",
        "nats per token",
        "Of the policy on what the refiner wrote: how far it is from writing so itself.",
        ("constraint/cross_entropy", "cross entropy"),
        floor=0,
    ),
    chart(
        "Groups that teach nothing",
        "share of groups",
        "Groups in which all responses are right, or all are wrong: no advantage comes of them.",
        ("reward/all_right_groups", "all right"),
        ("reward/all_wrong_groups", "all wrong"),
        floor=0,
    ),
    chart("KL to the reference", "nats per token", "How far the policy has moved.", ("policy/kl", "KL"), floor=0),
    chart(
        "KL, measured alone",
        "nats per token",
        "To the reference, of which the loss knows nothing.",
        ("constraint/kl", "KL"),
        floor=0,
    ),
    chart(
        "Entropy",
        "nats per token",
        "Of the policy. A fall towards zero ends exploration.",
        ("policy/entropy", "entropy"),
        floor=0,
    ),
    chart(
        "Response length",
        "tokens",
        "Mean, and the longest of a step.",
        ("response/length_mean", "mean"),
        ("response/length_max", "longest"),
        floor=0,
    ),
    chart(
        "Finished responses",
        "share of responses",
        "Ended with a stop token, not at the length limit.",
        ("response/finished", "finished"),
    ),
    chart("Loss", "per token or sequence", "What is minimised.", ("policy/loss", "loss")),
    chart(
        "Gradient norm",
        "L2, before clipping",
        "Of the policy's steps, of PIPO's verification, of the critic's.",
        ("policy/grad_norm", "policy"),
        ("verification/grad_norm", "verification"),
        ("value/grad_norm", "critic"),
        floor=0,
    ),
    chart(
        "Gradient norms of the constraint's two terms",
        "L2, before clipping",
        "Of the algorithm's part of the loss alone, and of the constraint's.",
        ("constraint/grad_norm_base", "algorithm"),
        ("constraint/grad_norm_constraint", "constraint"),
        floor=0,
    ),
    chart(
        "Clipped tokens",
        "share of tokens",
        "Tokens whose gradient the clip sets to zero.",
        ("policy/clip_fraction", "policy"),
        ("verification/clip_fraction", "verification"),
        floor=0,
    ),
    chart(
        "Engine against trainer",
        "nats",
        "The same tokens under the same weights: it should be rounding noise. KL per token, largest difference.",
        ("mismatch/kl", "KL"),
        ("mismatch/max", "largest"),
        log=True,
    ),
    chart(
        "Critic",
        "share",
        "Explained variance of the returns: 1 is a perfect critic, 0 one that knows the mean.",
        ("critic/explained_variance", "explained variance"),
    ),
    chart(
        "Distillation",
        "nats",
        "KL of the policy to its informed teacher.",
        ("policy/distillation", "KL"),
    ),
    chart(
        "Log-ratio of trajectories",
        "nats per trajectory",
        "Policy against reference, of right and of wrong trajectories.",
        ("dynamics/log_ratio_correct", "right"),
        ("dynamics/log_ratio_incorrect", "wrong"),
    ),
    chart(
        "Weight of trajectories",
        "geometric mean probability",
        "What the gradient of right and of wrong trajectories is weighted by.",
        ("dynamics/weight_correct", "right"),
        ("dynamics/weight_incorrect", "wrong"),
    ),
    chart(
        "Tokens per second",
        "tokens/s",
        "Generated, over the whole step.",
        ("tokens/per_second", "generated"),
        floor=0,
    ),
    chart(
        "Model FLOPs utilisation",
        "share of the peak",
        "Of the optimizer steps, on GPUs whose peak is known.",
        ("training/mfu", "MFU"),
        floor=0,
    ),
    chart("Memory peak", "GiB", "Of rank 0.", ("memory/peak_gib", "peak"), floor=0),
)


def shown(groups: list[Group]) -> list[Chart]:
    """Those with something to show. The loss of a policy gradient says nothing to look at: where there are rewards, it
    is left out."""

    def has(name: str) -> bool:
        return any(group.has(name) for group in groups)

    return [each for each in CHARTS if has(each.lines[0].metric) and not (each.title == "Loss" and has("reward/mean"))]


def phases(groups: list[Group]) -> list[str]:
    """Metrics of the phases of a step, by their share of the time, the longest first."""
    total: dict[str, float] = {}
    for group in groups:
        for run in group.runs:
            whole = sum(run.curves.of("seconds/step")[1]) or 1.0
            for name in run.curves.phases:
                total[name] = total.get(name, 0.0) + sum(run.curves.of(name)[1]) / whole
    return sorted(total, key=total.get, reverse=True)
