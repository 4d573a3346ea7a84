"""Alarms about known failures of the algorithms, from the last steps' metrics. `tracking.alarms` turns them off.

An alarm is told when its condition becomes true, and again only after the condition was false.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

STEPS = 10  # that a condition must hold in a row
FIRST = 20  # steps whose mean is compared with
PAGE = "docs/troubleshooting.md"
Metrics = dict[str, float]


@dataclass(frozen=True)
class Alarm:
    """`holds(steps, first)` gets the last STEPS steps that have the metric `needs`, and its mean over the first."""

    needs: str
    holds: Callable[[list[Metrics], float], bool]
    sentence: str
    page: str


def _all(name: str, condition: Callable[[float], bool]) -> Callable[[list[Metrics], float], bool]:
    return lambda steps, _: all(condition(step[name]) for step in steps)


def _groups_agree(steps: list[Metrics], _: float) -> bool:
    names = ("reward/all_right_groups", "reward/all_wrong_groups")
    return all(sum(step.get(name, 0.0) for name in names) >= 1 - 1e-9 for step in steps)


ALARMS = (
    Alarm(
        "policy/entropy",
        lambda steps, first: all(step["policy/entropy"] < 0.1 * first for step in steps),
        "the entropy has collapsed: below a tenth of what it was at first (policy/entropy)",
        f"{PAGE}, The reward does not rise",
    ),
    Alarm(
        "response/length_mean",
        lambda steps, first: all(
            step["response/length_mean"] > 2 * first and step.get("response/finished", 0.0) < 0.5 for step in steps
        ),
        "the responses explode: more than twice as long as at first, and most do not end (response/length_mean, "
        "response/finished)",
        f"{PAGE}, The reward does not rise",
    ),
    Alarm(
        "reward/group_std",  # absent where a group is one response, which always agrees with itself
        _groups_agree,
        "in every group all responses have the same verdict, so that none has an advantage (reward/all_right_groups, "
        "reward/all_wrong_groups)",
        f"{PAGE}, The reward does not rise",
    ),
    Alarm(
        "policy/kl",
        _all("policy/kl", lambda kl: kl > 1.0),
        "the policy is far from the reference: more than 1 nat per token (policy/kl)",
        f"{PAGE}, It learns, then collapses",
    ),
    Alarm(
        "pipo/suppressed",
        _all("pipo/suppressed", lambda suppressed: suppressed == 1),
        "PIPO has suppressed every step, that is, the reward has stayed below its anchor (pipo/suppressed, pipo/xi)",
        "docs/pipo_from_paper_to_recipe.md",
    ),
    Alarm(
        "constraint/improved",
        _all("constraint/improved", lambda improved: improved == 0),
        "the refiner has improved no response (constraint/improved)",
        "docs/dynamic.md",
    ),
    Alarm(
        "dynamics/future_weight_saturated",
        _all("dynamics/future_weight_saturated", lambda share: share > 0.95),
        "FPA's weights are nearly all within 0.01 of 0 or 1 (dynamics/future_weight_saturated)",
        "docs/offline.md",
    ),
)


class Alarms:
    """The alarms of one run. A resumed run begins its windows again."""

    def __init__(self) -> None:
        self._last: list[deque[Metrics]] = [deque(maxlen=STEPS) for _ in ALARMS]
        self._first: list[list[float]] = [[] for _ in ALARMS]
        self._holds = [False for _ in ALARMS]

    def check(self, metrics: Metrics, step: int) -> list[str]:
        """Return a sentence for each alarm whose condition becomes true in this step."""
        return [told for number, alarm in enumerate(ALARMS) if (told := self._check(number, alarm, metrics, step))]

    def _check(self, number: int, alarm: Alarm, metrics: Metrics, step: int) -> str:
        if alarm.needs not in metrics:
            return ""
        first, last = self._first[number], self._last[number]
        if len(first) < FIRST:
            first.append(metrics[alarm.needs])
        last.append(metrics)
        before, mean = self._holds[number], sum(first) / len(first)
        self._holds[number] = len(last) == STEPS and alarm.holds(list(last), mean)
        if before or not self._holds[number]:
            return ""
        return f"step {step}: for {STEPS} steps {alarm.sentence}. See {alarm.page}"
