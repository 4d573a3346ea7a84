"""The main program of an engine process: it serves one engine to the trainer's process through messages.

    python -m megatron_rft.inference.process_worker SOCKET BUCKETS

The arguments are two file descriptors.

Messages are tuples that begin with a name. In: build, open (buckets on a GPU), generate, load, full (a bucket of
weights), loaded (no more buckets), checksums, close. Out: beat, group, end, read, done, failed. A thread sends `beat`
every second with the count of the engine's steps, groups and buckets; if the count stops growing, the engine hangs.
"""

import contextlib
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from multiprocessing.connection import Connection

import torch

from megatron_rft.inference.engine import Engine, Request, Sampling
from megatron_rft.inference.transport.buckets import Buckets, Full
from megatron_rft.inference.transport.shared_memory import gpus, opened, slots_of
from megatron_rft.utils.errors import RunFailed, UserError
from megatron_rft.utils.position import write_engine_stacks

BEAT_S = 1.0


class EngineHost:
    def __init__(self, connection: Connection, buckets: Buckets):
        self.connection, self.buckets = connection, buckets
        self.device: torch.device | None = None  # where weights go, when their buckets are on a GPU
        self.engine: Engine | None = None
        self.done = 0  # steps, groups and buckets
        self._waiting: deque[tuple] = deque()  # messages that arrived while another was being served
        self._ids = count()  # of requests in the engine
        self._origins: dict[int, tuple[int, int]] = {}  # by these: the job, the request's id there
        self._left: dict[int, int] = {}  # job -> requests without an answer
        self._sending = threading.Lock()

    def run(self) -> None:
        threading.Thread(target=self._beat, daemon=True).start()
        while True:
            name, *rest = self._waiting.popleft() if self._waiting else self.connection.recv()
            if name == "close":
                break
            try:
                getattr(self, f"_{name}")(*rest)
            except Exception as error:
                self._send("failed", reportable(error, "the engine process failed"))
        if self.engine is not None:
            self.engine.close()

    def _send(self, *message) -> None:
        with self._sending:
            self.connection.send(message)

    def _beat(self) -> None:
        while True:
            self._send("beat", self.done)
            time.sleep(BEAT_S)

    # ---- messages from the trainer

    def _build(self, build) -> None:
        self.engine = build()
        self.engine.on_step = self._on_step
        self._send("done", (self.engine.dtype, gpus(), self.engine.joins))

    def _open(self, gpu: str, arguments: list) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.buckets = Buckets(opened(gpu, arguments))
        self._send("done", None)

    def _generate(self, job: int, requests: list[Request], sampling: Sampling) -> None:
        self._sampling = sampling
        try:
            for group in self.engine.generate(self._of_job(job, requests), sampling):
                self.done += 1
                job, id = self._origins.pop(group.id)
                self._send("group", job, replace(group, id=id))
                self._left[job] -= 1
                if not self._left[job]:
                    self._end(job)
        except Exception as problem:
            error = reportable(problem, "the engine process failed")
            self._origins.clear()
            for each in list(self._left):
                self._end(each, error)

    def _of_job(self, job: int, requests: list[Request]) -> list[Request]:
        """The requests with ids of their own, because several jobs may be generated together."""
        numbered = [replace(request, id=next(self._ids)) for request in requests]
        self._origins |= {new.id: (job, request.id) for new, request in zip(numbered, requests, strict=True)}
        self._left[job] = len(requests)
        return numbered

    def _end(self, job: int, error: Exception | None = None) -> None:
        del self._left[job]
        self._send("end", job, error, self.engine.statistics())

    def _on_step(self) -> None:
        """Between two steps of generation: load new weights and add requests, if they have arrived. Other messages
        wait."""
        self.done += 1
        while self.connection.poll():
            name, *rest = self.connection.recv()
            if name == "load":
                self._load(*rest)
            elif name == "generate" and self.engine.joins and rest[-1] == self._sampling:
                self.engine.add(self._of_job(*rest[:2]))
            else:
                self._waiting.append((name, *rest))

    def _load(self, version: int) -> None:
        full, read = self._full_buckets(), partial(self._send, "read")
        stream, answer = self.buckets.receive(full, read, self.device), ("done", None)
        try:
            self.engine.load_weights(stream, version)
        except Exception as error:
            answer = ("failed", reportable(error, f"weights of version {version}"))
        for _ in stream:  # after an error the trainer still sends the whole stream
            pass
        for _ in full:
            read()
        self._send(*answer)

    def _full_buckets(self) -> Iterator[Full]:
        while (message := self.connection.recv())[0] != "loaded":
            if message[0] == "full":
                self.done += 1
                yield message[1]
            else:
                self._waiting.append(message)

    def _checksums(self) -> None:
        self._send("done", self.engine.checksums())


def reportable(error: Exception, what: str) -> Exception:
    """Return the error that the trainer's process raises. Print the traceback of an unexpected one to the log."""
    if isinstance(error, RunFailed | UserError):
        return error
    traceback.print_exc()
    return RunFailed(f"{what}: {type(error).__name__}: {error}")


def main(socket: int, buckets: int) -> None:
    write_engine_stacks()
    sys.stdout.reconfigure(line_buffering=True)  # the log must be complete when this process dies
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer has ended
        EngineHost(Connection(socket), Buckets(slots_of(buckets))).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # does not wait for the heartbeat's thread and for threads of the engine


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
