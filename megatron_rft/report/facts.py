"""Computes the top of the page: the headline numbers of a group of runs, and the main options of its recipe."""

from dataclasses import dataclass

from megatron_rft.report.groups import RunGroup, mean_and_error
from megatron_rft.report.runs import RecordedRun
from megatron_rft.tracking.progress import clock_time


@dataclass(frozen=True)
class Headline:
    label: str
    value: str
    more: str = ""


def headline(group: RunGroup) -> list[Headline]:
    """Return the headline numbers of a group, the most important first."""
    found = [accuracy(group), reward(group), *pace(group)]
    return [number for number in found if number is not None]


def accuracy(group: RunGroup) -> Headline | None:
    """Return pass@1 on the test problems before and after training, else the first and last on the held-out ones."""
    for label, evaluations in (("pass@1, test", _tested), ("pass@1, held out", _validated)):
        runs = [found for run in group.runs if len(found := evaluations(run)) > 1]
        if runs:
            (before, _), (after, error) = (_with_error([found[i] for found in runs]) for i in (0, -1))
            return Headline(label, f"{before:.3f} → {after:.3f}", "" if error is None else f"± {error:.3f}")
    return None


def _with_error(pairs: list[tuple[float, float | None]]) -> tuple[float, float | None]:
    """Return mean and standard error over seeds; a single seed keeps its own error."""
    if len(pairs) == 1:
        return pairs[0]
    return mean_and_error([value for value, _ in pairs])


def _tested(run: RecordedRun) -> list[tuple[float, float | None]]:
    return [(result["pass_at_1"], result.get("standard_error")) for _, result in run.evaluated("test")]


def _validated(run: RecordedRun) -> list[tuple[float, float | None]]:
    records = [record for record in run.records if record.get("evaluation/pass@1") is not None]
    return [(record["evaluation/pass@1"], record.get("evaluation/pass@1_se")) for record in records]


def reward(group: RunGroup) -> Headline | None:
    """Return the mean reward of the first and of the last tenth of the steps."""
    pairs = []
    for run in group.runs:
        values = run.of("reward/mean")[1]
        tenth = max(len(values) // 10, 1)
        if values:
            pairs.append((sum(values[:tenth]) / tenth, sum(values[-tenth:]) / tenth))
    if not pairs:
        return None
    first, last = (mean_and_error([pair[i] for pair in pairs])[0] for i in (0, 1))
    return Headline("reward", f"{first:.3f} → {last:.3f}", "first and last tenth")


def pace(group: RunGroup) -> list[Headline]:
    """Return the numbers of steps, seconds, tokens and skipped optimizer steps."""
    done = [run.steps for run in group.runs]
    planned = {run.options.get("run.steps") for run in group.runs} - {None}
    of = f"of {max(planned)}" if planned and max(planned) != min(done) else ""
    least, most = min(done), max(done)
    numbers = [Headline("steps", str(most) if least == most else f"{least} to {most}", of)]
    seconds = [sum(run.of("seconds/step")[1]) for run in group.runs]
    if any(seconds):
        each = [value for run in group.runs for value in run.of("seconds/step")[1][1:]] or [0.0]
        numbers.append(
            Headline("time", clock_time(sum(seconds) / len(seconds)), f"{sum(each) / len(each):.1f} s a step")
        )
    tokens = [value for run in group.runs for value in run.of("tokens/per_second")[1]]
    if tokens:
        numbers.append(Headline("tokens/s", f"{sum(tokens) / len(tokens):,.0f}", "generated"))
    skipped = sum(sum(run.of("faults/skipped_steps")[1][-1:]) for run in group.runs)
    if skipped:
        numbers.append(Headline("skipped", f"{skipped:.0f}", "optimizer steps that were not finite"))
    return numbers


# Options on the card of a group; the recipe's others are below the charts.
SHOWN = (
    *("model.path", "model.precision", "data.train.path", "algorithm.name", "algorithm.objective"),
    *("rollout.prompts_per_step", "rollout.group_size", "rollout.max_response_tokens", "rollout.temperature"),
    *("algorithm.batch_sequences", "optimizer.lr", "algorithm.kl_coefficient", "reward.kind"),
    *("pipo.window", "pipo.learning_rate", "constraint.kind"),
)


def recipe_facts(group: RunGroup) -> list[tuple[str, str]]:
    options = group.runs[0].options
    facts = [(name, str(options[name])) for name in SHOWN if options.get(name) is not None]
    seeds = ", ".join(str(run.seed) for run in group.runs)
    return [*facts, ("seeds" if len(group.runs) > 1 else "seed", seeds)]
