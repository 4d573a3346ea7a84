"""Computes the top of the page: the headline numbers of a group of runs."""

from dataclasses import dataclass

from megatron_rft.report.groups import RunGroup, mean_and_error
from megatron_rft.report.runs import RecordedRun


@dataclass(frozen=True)
class Headline:
    label: str
    value: str
    more: str = ""


def headline(group: RunGroup) -> list[Headline]:
    """Return the headline numbers of a group, the most important first."""
    return [number for number in (accuracy(group), reward(group)) if number is not None]


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
