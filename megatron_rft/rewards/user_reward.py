"""Uses a function of the user as a reward. It runs in processes of its own (rewards/worker.py), so what is slow, dead
or broken there costs a response and not the run. Imports no torch."""

import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any

from megatron_rft.responses import Prompt, Score, number
from megatron_rft.rewards.base import Reward
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import CodeError
from megatron_rft.utils.worker_process import CallFailed, ProcessLost, WorkerProcess

LIMIT = "reward.timeout_s"
GRACE_S = 1.0  # an async function's own limit comes first


@dataclass(eq=False)
class Ungraded:
    """A response to grade. Those of a unit are responses to one problem."""

    unit: int
    prompt: Prompt
    text: str
    score: Future = field(default_factory=Future)
    lost: bool = False  # with its process, while it was graded


class RewardProcess(WorkerProcess):
    """One process. Whenever it is free it gets all tasks that wait, in one message."""

    def __init__(self, options: dict[str, Any]):
        super().__init__("megatron_rft.rewards.worker", options, options["timeout_s"], None, "reward", LIMIT)
        self.waiting: deque[Ungraded] = deque()

    def add(self, tasks: list[Ungraded]) -> None:
        self.waiting.extend(tasks)
        self.thread.submit(self._grade)

    def _grade(self) -> None:
        tasks = [self.waiting.popleft() for _ in range(len(self.waiting))]
        batches = [tasks]
        try:
            while batches:
                batches += filter(None, self._ask(batches.pop(0)))
        except BaseException as error:  # who waits for a score ends the run
            for task in tasks:
                if not task.score.done():
                    task.score.set_exception(error)

    def _ask(self, tasks: list[Ungraded]) -> list[list[Ungraded]]:
        """Grade tasks. Returns what to ask again, in parts, because there was no answer."""
        left = dict(enumerate(tasks))
        try:
            if tasks:
                self.running()
                self.send(rows=[(place, task.unit, task.prompt, task.text) for place, task in left.items()])
            while left:
                place, score = self.receive(GRACE_S)
                left.pop(place).score.set_result(Score(**score))
            return []
        except CallFailed as error:
            return self._again([*left.values()], error)

    def _again(self, left: list[Ungraded], error: CallFailed) -> list[list[Ungraded]]:
        """A function was busy with the first task, or all of its unit; an async one with any. What lost a process is
        asked once more, alone; what loses another one, or is late, has an error."""
        takes_lists, waits = self.about
        cuts = [k for k in range(1, len(left)) if not takes_lists or left[k].unit != left[k - 1].unit]
        if waits and cuts:
            middle = cuts[len(cuts) // 2]
            return [left[:middle], left[middle:]]
        busy, rest = (left[: cuts[0]], left[cuts[0] :]) if cuts else (left, [])
        if isinstance(error, ProcessLost) and not busy[0].lost:
            busy[0].lost = True
            return [busy, rest]
        for task in busy:
            reason = f"{where(self.options['function'], task.prompt, task.text)}: {error}"
            task.score.set_result(Score(0.0, error=reason))
        return [rest]

    def close(self) -> None:
        super().close()
        for task in self.waiting:
            task.score.cancel()


class UserReward(Reward):
    """`function(prompt, text)` returns a number or a `Score`; `function(prompts, texts)` a list of them for the
    responses to one problem; `signature` has others. An exception is an error of the grader, not a reward.

    Raises, when it grades:
        ConfigError: the function cannot be loaded or called.
        CodeError: what it returned can never be used.
    """

    def __init__(self, maximum: float | None, processes: int, **options: Any):
        """`options`: those of `worker.Grader`."""
        self.maximum = math.inf if maximum is None else maximum
        self.members = [RewardProcess(options) for _ in range(processes)]
        self.units = itertools.count()

    def check(self) -> None:
        """Start a process, to see that the function is there. Raises ConfigError."""
        self.members[0].running()

    def begin(self, prompts: Sequence[Prompt], texts: list[str]) -> Callable[[], list[Score]]:
        tasks: list[Ungraded] = []
        for _, unit in groupby(zip(prompts, texts, strict=True), key=lambda pair: pair[0].index):
            number, responses = next(self.units), list(unit)
            prompt = replace(responses[0][0], token_ids=())
            tasks += [Ungraded(number, prompt, text) for _, text in responses]
        for place, member in enumerate(self.members):
            if share := [task for task in tasks if task.unit % len(self.members) == place]:
                member.add(share)
        return lambda: [self._within(task, task.score.result()) for task in tasks]

    def _within(self, task: Ungraded, score: Score) -> Score:
        if score.error is None and score.reward > self.maximum + 1e-6:  # a sum is rounded
            at = where(self.members[0].options["function"], task.prompt, task.text)
            raise CodeError(
                f"{at}: the reward is {score.reward:g}, above its maximum, {self.maximum:g}: set a higher one"
            )
        return score

    def close(self) -> None:
        for member in self.members:
            member.close()


def where(function: str, prompt: Prompt, text: str) -> str:
    """For messages about a response."""
    return f"{function}: problem {prompt.index}, response {text[:80]!r}"


def checked_score(result: Any, function: Callable[..., Any]) -> dict[str, Any]:
    """The fields of the `Score` or number that a function returned, ready for JSON. Raises CodeError."""
    try:
        score = result if isinstance(result, Score) else Score(number(result))
        words = json.dumps(asdict(score), ensure_ascii=False, default=_plain)
        words.encode()
    except UnicodeEncodeError:
        raise user_code.broken(function, result, user_code.SURROGATE) from None
    except (TypeError, ValueError):
        fix = "return a number or a Score; its reason is a text, its details are numbers, texts, lists and dicts"
        raise user_code.broken(function, result, fix) from None
    return json.loads(words)


def _plain(value: Any) -> Any:
    """numpy's numbers and arrays, and tensors, as Python's."""
    if not hasattr(value, "tolist"):
        raise TypeError(value)
    return value.tolist()
