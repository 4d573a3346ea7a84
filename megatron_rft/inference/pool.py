"""Presents the engines that run outside of the ranks as one engine, and replaces lost ones.

Each rank drives zero or more engines (`shares`). A lost engine loses its weights and its unfinished requests. Reloading
weights from the actor is collective, so lost engines restart only in `recover`: all ranks restart their lost engines
and send the actor's current weights. `retry` then generates the unfinished requests once more.
"""

import queue
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from megatron_rft.inference.acceptance import joined
from megatron_rft.inference.engine import Engine, EngineLost, Group, Request, Sampling
from megatron_rft.utils.errors import RunFailed

Play = Callable[[Engine, list[Request], Sampling], Iterator[Group]]


def generated(engine: Engine, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
    return engine.generate(requests, sampling)


class Member(Engine):
    """One engine of a pool, which may be lost."""

    name: str

    @abstractmethod
    def start(self) -> None:
        """Start a replacement, without weights."""


class EnginePool(Engine):
    """
    Args:
        members: the engines that this rank drives.
        gather: concatenates all ranks' lists, on every rank.
        driver: this rank's index among the ranks that drive engines (None: it drives none), and the number of them.

    `generate`, and `recover` after `load_weights`, are collective. The trainer sets `reload`, which sends the actor's
    weights into this pool and verifies them.
    """

    def __init__(
        self,
        members: list[Member],
        dtype: torch.dtype,
        gather: Callable[[list], list] = list,
        driver: tuple[int | None, int] = (0, 1),
    ):
        self.members, self.dtype, self.gather, self._driver = members, dtype, gather, driver
        self.lost: dict[int, str] = {}  # index of the member -> the error
        self._generating = threading.Lock()
        self.restarts = 0  # of all engines of the run
        self.news: list[str] = []  # messages about restarts, for the log

    # ---- generation

    def generate(self, requests: list[Request], sampling: Sampling, play: Play = generated) -> Iterator[Group]:
        left: list[Request] = []
        yield from self.begin(requests, sampling, left, play)
        yield from self.retry(left, sampling, play)

    def begin(
        self, requests: list[Request], sampling: Sampling, left: list[Request], play: Play = generated
    ) -> Iterator[Group]:
        """Yield groups of this rank's engines; append the unfinished requests of lost engines to `left`. `play` answers
        requests with one engine.

        Not collective. Only `load_weights` may run at the same time, in another thread."""
        ended: queue.Queue = queue.Queue()
        parts = [requests[i :: len(self.members)] for i in range(len(self.members))]
        assert self.members or not requests, "a rank without an engine has requests"

        def drive(member: int, part: list[Request]) -> None:
            waiting = {request.id: request for request in part}
            try:
                for group in play(self.members[member], part, sampling) if member not in self.lost else ():
                    del waiting[group.id]
                    ended.put(group)
            except EngineLost as error:
                self.lost[member] = str(error)
            finally:
                left.extend(waiting.values() if member in self.lost else ())
                ended.put(None)

        with self._generating, ThreadPoolExecutor(max(len(parts), 1), thread_name_prefix="engine") as pool:
            jobs = [pool.submit(drive, *each) for each in enumerate(parts)]
            for _ in jobs:
                yield from iter(ended.get, None)
            for job in jobs:
                job.result()

    def retry(self, left: list[Request], sampling: Sampling, play: Play = generated) -> Iterator[Group]:
        """Collective. Replace lost engines and generate the requests that `begin` left unfinished."""
        self.recover()
        if any(self.gather([bool(left)])):
            yield from self.begin(left, sampling, [], play)
            self._stop_if_lost("a second time, at the requests that it was asked again")

    # ---- weights

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load all members in parallel. Call `recover` afterwards: a lost member has not received the weights."""
        living = [i for i in range(len(self.members)) if i not in self.lost]
        queues = [queue.Queue(maxsize=1) for _ in living]
        with ThreadPoolExecutor(max(len(living), 1), thread_name_prefix="weights") as pool:
            jobs = [pool.submit(self._load, i, tensors, version) for i, tensors in zip(living, queues, strict=True)]
            try:
                for pair in stream:
                    for tensors in queues:
                        tensors.put(pair)
            finally:
                for tensors in queues:
                    tensors.put(None)
            for job in jobs:
                job.result()

    def _load(self, member: int, tensors: queue.Queue, version: int) -> None:
        stream = iter(tensors.get, None)
        try:
            self.members[member].load_weights(stream, version)
        except EngineLost as error:
            self.lost[member] = str(error)
        finally:
            for _ in stream:  # other members and the actor's collectives need the rest of the stream
                pass

    def checksums(self) -> dict[str, int]:
        """Return the members' checksums. Raises RunFailed if two members differ. Empty on a rank without members."""
        known: dict[str, int] = {}
        for member, checksums in self._ask_each(lambda member: member.checksums()):
            different = [name for name in checksums if known.setdefault(name, checksums[name]) != checksums[name]]
            if different:
                raise RunFailed(f"{member.name} holds another {min(different)} than {self.members[0].name}")
        return known

    def driver(self) -> tuple[int | None, int]:
        return self._driver

    def statistics(self) -> dict[str, float]:
        counted = joined(counted for _, counted in self._ask_each(lambda member: member.statistics()))
        return {"faults/engine_restarts": float(self.restarts)} | counted

    def take_news(self) -> list[str]:
        news, self.news = self.news, []
        return news

    def _ask_each(self, ask: Callable[[Member], dict]) -> Iterator[tuple[Member, dict]]:
        """Yield each member that is not lost with its answer."""
        for i, member in enumerate(self.members):
            try:
                answer = {} if i in self.lost else ask(member)
            except EngineLost as error:
                self.lost[i] = str(error)
            else:
                yield member, answer

    # ---- losses

    def recover(self) -> bool:
        if not any(self.gather([bool(self.lost)])):
            return False
        if self.reload is None:
            raise RunFailed("an engine was lost, and there are no weights for another")
        with self._generating:  # wait until `begin` has appended all unfinished requests
            news = self.gather(list(self.lost.values()))  # gathered again: more may be lost by now
            self.restarts += len(news)
            self.news += [f"{what}; it was started again with the actor's weights" for what in news]
            for member in self.lost:
                self.members[member].start()
            self.lost = {}
            self.reload()
        self._stop_if_lost("again, while it got its weights after a restart")
        return True

    def _stop_if_lost(self, how: str) -> None:
        if news := self.gather(list(self.lost.values())):
            raise RunFailed(f"{news[0]} {how}: the run stops here")

    def close(self) -> None:
        for member in self.members:
            member.close()


def shares(engines: int, rank: int, world: int) -> tuple[range, int | None, int]:
    """Return the engines that `rank` drives, its index among the ranks that drive any (None: it drives none), and the
    number of these. With 4 engines, 2 ranks drive 0 2 and 1 3. With 2 engines, ranks 0 and 2 of 4 drive one each.
    """
    if engines >= world:
        return range(rank, engines, world), rank, world
    drivers = [engine * world // engines for engine in range(engines)]
    if rank not in drivers:
        return range(0), None, engines
    number = drivers.index(rank)
    return range(number, number + 1), number, engines
