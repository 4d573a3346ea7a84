"""The main program of a process in which a user's reward runs.

    python -m megatron_rft.rewards.worker SOCKET OPTIONS

The arguments are a file descriptor and options as JSON. A message has rows (place, unit, prompt, text), those of a
unit being responses to one problem. The answers are (place, fields of the score).
utils/worker_process.py has their form.
"""

import asyncio
import inspect
import resource
from collections.abc import Callable
from itertools import groupby
from typing import Any

from megatron_rft.responses import Prompt
from megatron_rft.rewards.signatures import LISTS, OPTION, call, check, results
from megatron_rft.rewards.user_reward import LIMIT, checked_score, where
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import CodeError, ConfigError
from megatron_rft.utils.worker_process import failure, late, serve

ATTEMPTS = 2
AT_ONCE = 64
Row = tuple[int, int, Prompt, str]
Send = Callable[[dict[str, Any]], None]


class Grader:
    """Calls the function of the recipe, whose module is loaded once and stays."""

    def __init__(
        self, function: str, signature: str | None, timeout_s: float, memory_mb: int | None, at_once: int | None
    ):
        if memory_mb:
            resource.setrlimit(resource.RLIMIT_DATA, (memory_mb << 20, memory_mb << 20))
        self.name, self.timeout_s, self.function = function, timeout_s, user_code.load(function, OPTION)
        self.signature = check(self.function, signature, function)
        self.waits = any(map(inspect.iscoroutinefunction, (self.function, type(self.function).__call__)))
        if at_once and not self.waits:
            raise ConfigError(
                f"reward.at_once: {at_once}, but {function} is no async function: its calls follow each other. Leave "
                "it out; reward.processes sets how many run at the same time"
            )
        self.slots, self.loop = asyncio.Semaphore(at_once or AT_ONCE), asyncio.new_event_loop()

    def answer(self, send: Send, rows: list[Row]) -> None:
        """Grade each row; with a function of lists, those of a unit together."""
        units = groupby(rows, key=lambda row: row[1] if self.signature in LISTS else row[0])
        calls = [list(unit) for _, unit in units]
        try:
            if self.waits:
                self.loop.run_until_complete(self._all(send, calls))
            for unit in [] if self.waits else calls:
                tell(send, unit, self._judged(unit))
        except CodeError as error:
            send(failure(error))

    def _judged(self, rows: list[Row]) -> list[dict[str, Any]]:
        """If the function raises, it is called once more."""
        for _ in range(ATTEMPTS):
            user_code.seed_generators(f"{rows[0][2].index}/{rows[0][3]}")
            try:
                return self._scores(rows, self._result(rows))
            except BaseException as error:  # also sys.exit, which is the code's own
                failed = self._failed(rows, error)
        return failed

    async def _all(self, send: Send, calls: list[list[Row]]) -> None:
        await asyncio.gather(*(self._when_free(send, call) for call in calls))

    async def _when_free(self, send: Send, rows: list[Row]) -> None:
        async with self.slots:
            try:
                async with asyncio.timeout(self.timeout_s):
                    scores = await self._judged_async(rows)
            except TimeoutError:
                reason = f"{self._where(rows)}: {late(self.timeout_s, LIMIT)}"
                scores = [{"reward": 0.0, "error": reason}] * len(rows)
            tell(send, rows, scores)

    async def _judged_async(self, rows: list[Row]) -> list[dict[str, Any]]:
        for _ in range(ATTEMPTS):
            try:
                return self._scores(rows, await self._result(rows))
            except asyncio.CancelledError:  # by the time limit
                raise
            except BaseException as error:
                failed = self._failed(rows, error)
        return failed

    def _result(self, rows: list[Row]) -> Any:
        return call(self.signature, self.function, [row[2] for row in rows], [row[3] for row in rows])

    def _scores(self, rows: list[Row], result: Any) -> list[dict[str, Any]]:
        several = results(self.signature, self.function, result, len(rows))
        return [checked_score(each, self.function) for each in several]

    def _failed(self, rows: list[Row], error: BaseException) -> list[dict[str, Any]]:
        """The scores of responses on which the function raised. What can never be used is raised again."""
        if isinstance(error, CodeError):
            raise CodeError(f"{self._where(rows)}: {error}") from None
        option = ", reward.memory_mb" if isinstance(error, MemoryError) else ""
        return [{"reward": 0.0, "error": f"{self._where(rows)}: {failure(error)['error']}{option}"}] * len(rows)

    def _where(self, rows: list[Row]) -> str:
        return where(self.name, rows[0][2], rows[0][3])


def made(**options: Any) -> tuple[Callable[..., None], tuple[bool, bool]]:
    grader = Grader(**options)
    return grader.answer, (grader.signature in LISTS, grader.waits)


def tell(send: Send, rows: list[Row], scores: list[dict[str, Any]]) -> None:
    for (place, *_), score in zip(rows, scores, strict=True):
        send({"value": [place, score]})


if __name__ == "__main__":
    serve(made)
