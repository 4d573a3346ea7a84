"""The engines that a run has outside of its ranks, as one engine; lost ones are replaced.

Each rank drives some of them (one, several, none: `shares`). An engine that is lost loses its weights and the requests
it was at. New weights come from the actor, which takes all ranks, so there is one moment for it: when a rank has got
what it could, all ranks together ask each other whether an engine was lost (`recover`), start those anew, push the
weights that the actor has now, and the requests left over are asked again, once.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from megatron_rft.inference.acceptance import joined
from megatron_rft.inference.engine import Engine, EngineLost, Group, Request, Sampling
from megatron_rft.utils.errors import RunFailed


class Member(Engine, Protocol):
    """An engine that can be lost."""

    name: str

    def start(self) -> None:
        """Another in its place, without weights."""
        ...


class Fleet(Engine):
    """`members`: what this rank drives. `gather(list)` gives the concatenation of all ranks' lists on every rank.
    `place`: this rank's among those that drive any (None: it is not one of them), and their number.

    `generate`, and `recover` after a `load_weights`, are called by all ranks together. `reload` is the trainer's: it
    pushes the actor's weights, proven, into this engine.
    """

    def __init__(
        self,
        members: list[Member],
        dtype: torch.dtype,
        gather: Callable[[list], list] = list,
        place: tuple[int | None, int] = (0, 1),
    ):
        self.members, self.dtype, self.gather, self.place = members, dtype, gather, place
        self.reload: Callable[[], None] = self._no_source
        self.weight_version = -1
        self.lost: dict[int, str] = {}  # member -> what happened to it
        self._asking = threading.Lock()
        self.restarts = 0  # of the whole run's engines
        self.news: list[str] = []  # for a person

    # ---- generation

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        left: list[Request] = []
        yield from self.begin(requests, sampling, left)
        yield from self.rest(left, sampling)

    def begin(self, requests: list[Request], sampling: Sampling, left: list[Request]) -> Iterator[Group]:
        """Groups of this rank's engines; what those leave over that were lost on the way is put into `left`.
        No collective: one thread besides the trainer's may call it, and only `load_weights` may come in between."""
        ended: queue.Queue = queue.Queue()
        parts = [requests[i :: len(self.members)] for i in range(len(self.members))]
        assert self.members or not requests, "a rank without an engine has requests"
        with self._asking, ThreadPoolExecutor(max(len(parts), 1), thread_name_prefix="engine") as pool:
            jobs = [pool.submit(self._drive, i, part, sampling, ended, left) for i, part in enumerate(parts)]
            for _ in jobs:
                while (group := ended.get()) is not None:
                    yield group
            for job in jobs:
                job.result()

    def _drive(
        self, member: int, requests: list[Request], sampling: Sampling, ended: queue.Queue, left: list[Request]
    ) -> None:
        waiting = {request.id: request for request in requests}
        try:
            if member in self.lost:
                return
            for group in self.members[member].generate(requests, sampling):
                del waiting[group.id]
                ended.put(group)
        except EngineLost as error:
            self.lost[member] = str(error)
        finally:
            left += waiting.values() if member in self.lost else []
            ended.put(None)

    def rest(self, left: list[Request], sampling: Sampling) -> Iterator[Group]:
        """Collective. The groups that `begin` left over, on any rank."""
        self.recover()
        if any(self.gather([bool(left)])):
            yield from self.begin(left, sampling, [])
            self._stop_if_lost("a second time, at the requests that it was asked again")

    # ---- weights

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """To all members at once. `recover` must follow: a member that was lost has not got them."""
        living = [i for i in range(len(self.members)) if i not in self.lost]
        queues = [queue.Queue(maxsize=1) for _ in living]
        with ThreadPoolExecutor(max(len(living), 1), thread_name_prefix="weights") as pool:
            jobs = [pool.submit(self._load, i, each, version) for i, each in zip(living, queues, strict=True)]
            try:
                for pair in stream:
                    for each in queues:
                        each.put(pair)
            finally:
                for each in queues:
                    each.put(None)
            for job in jobs:
                job.result()
        self.weight_version = version

    def _load(self, member: int, tensors: queue.Queue, version: int) -> None:
        stream = iter(tensors.get, None)
        try:
            self.members[member].load_weights(stream, version)
        except EngineLost as error:
            self.lost[member] = str(error)
        finally:
            for _ in stream:  # the others, and the actor's collectives, go on
                pass

    def checksums(self) -> dict[str, int]:
        """Of all members, which must agree; of a rank without any, nothing."""
        found: dict[str, int] = {}
        for member, held in self._of_each(lambda member: member.checksums()):
            different = [name for name in held if found.setdefault(name, held[name]) != held[name]]
            if different:
                raise RunFailed(f"{member.name} holds another {min(different)} than {self.members[0].name}")
        return found

    def statistics(self) -> dict[str, float]:
        return joined(counted for _, counted in self._of_each(lambda member: member.statistics()))

    def _of_each(self, ask: Callable[[Member], dict]) -> Iterator[tuple[Member, dict]]:
        """Who is there, and what it answers."""
        for i, member in enumerate(self.members):
            try:
                answer = {} if i in self.lost else ask(member)
            except EngineLost as error:
                self.lost[i] = str(error)
            else:
                yield member, answer

    # ---- losses

    def recover(self) -> bool:
        """Collective. Replace engines that were lost on any rank; whether there were any."""
        if not any(self.gather([bool(self.lost)])):
            return False
        with self._asking:  # what a lost engine has not been asked yet is found to be left over, and waits as well
            news = self.gather(list(self.lost.values()))  # by now others may be lost too
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

    def _no_source(self) -> None:
        raise RunFailed("an engine was lost, and there are no weights for another")

    def close(self) -> None:
        for member in self.members:
            member.close()


def shares(engines: int, rank: int, world: int) -> tuple[range, int | None, int]:
    """Who drives what: the engines of `rank`; its place among the ranks that drive any (None: not one of them), and
    their number. 4 engines, 2 ranks: 0 2 and 1 3. 2 engines, 4 ranks: rank 0 and rank 2 drive one each.
    """
    if engines >= world:
        return range(rank, engines, world), rank, world
    drivers = [engine * world // engines for engine in range(engines)]
    if rank not in drivers:
        return range(0), None, engines
    place = drivers.index(rank)
    return range(place, place + 1), place, engines
