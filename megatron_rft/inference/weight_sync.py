"""Sends weights to an engine and verifies them. The stream runs collectives: after an error it is read to its end.

The engine refuses tensors that are unknown, missing, repeated, misshapen, non-finite, or newly all zero
(`Engine.load_weights`). This file checks that the engine has read the whole stream and, on request, that its parameters
equal the stream bit for bit in the engine's dtype, except for parameters that it rounds.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from megatron_rft.inference.engine import Engine, checksum, request_seed
from megatron_rft.utils.errors import RunFailed


def send(
    stream: Iterable[tuple[str, Tensor]],
    engine: Engine,
    version: int,
    verify: bool = False,
    sent: dict[str, int] | None = None,
) -> dict[str, float]:
    """Load `stream` into `engine` as weights of `version`. Returns metrics. `sent` gets the checksums.

    Raises:
        RunFailed: the engine's parameters differ from the stream. The message names one.
    """
    start = time.perf_counter()
    sent = {} if sent is None and verify else sent
    sizes = load(stream, engine, version, sent)
    if verify and (received := engine.checksums()):
        compare(sent, received, version)
    seconds, count = time.perf_counter() - start, float(len(sizes))
    return {"sync/seconds": seconds, "sync/bytes": float(sum(sizes)), "sync/tensors": count}


def load(
    stream: Iterable[tuple[str, Tensor]], engine: Engine, version: int, checksums: dict[str, int] | None = None
) -> list[int]:
    """Load `stream`, all of it, into `engine`. Returns the bytes of each tensor. The tensors' checksums in the engine's
    dtype are added to `checksums`."""
    stream, sizes = iter(stream), []

    def passing() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            sizes.append(tensor.nbytes)
            if checksums is not None:
                checksums[name] = checksum(tensor.to(engine.dtype))
            yield name, tensor

    try:
        engine.load_weights(passing(), version)
    finally:
        left = [name for name, _ in stream]
    if left:
        raise RunFailed(f"weights of version {version}: the engine stopped reading before {left[0]}")
    return sizes


def compare(sent: dict[str, int], received: dict[str, int | None], version: int) -> None:
    """Raise RunFailed if checksums differ. None in `received`: the engine rounds this tensor and has compared it."""
    names = sent.keys() | received.keys()
    different = [name for name in names if received.get(name, -1) not in (None, sent.get(name))]
    if different:
        raise RunFailed(
            f"weights of version {version}: {min(different)} in the engine is not what the actor sent "
            f"({len(different)} of {len(sent)} tensors differ)"
        )


class EngineWeights:
    """Sends an actor's weights to the engine, and again to a replacement of a lost engine.

    `actor`: a megatron.actor.Actor. `offloaded`: those whose gradients and optimizer state are in host memory while the
    engine is awake.
    """

    def __init__(self, actor: Any, engine: Engine, offloaded: Iterable[Any] = ()):
        self.actor, self.engine, self.offloaded, self.asleep = actor, engine, list(offloaded), False
        self.version: int | None = None  # the step whose weights the engine has
        self.named, self.name = False, ""  # the step and a digest of the weights, if they are `named`
        engine.reload = lambda: send(self._stream(), engine, self.version, verify=True)

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        return self.actor.stream(dtype=self.engine.dtype)

    def sent(self, version: int) -> bool:
        """Whether the engine is awake with the weights of `version`."""
        return version == self.version and not self.asleep

    def sleep(self) -> None:
        """Put the engine to sleep until the next `send`: an engine in this process frees its memory for the trainer."""
        self.engine.sleep()
        self.asleep = True
        for model in self.offloaded:
            model.training_state.restore()

    def sleep_to_save(self) -> None:
        """Restore offloaded optimizer state to the device, so that a checkpoint can read it."""
        if self.offloaded:
            self.sleep()

    def wake(self) -> None:
        """Wake a sleeping engine with the weights that were sent last. Collective."""
        if self.asleep:
            self.send(self.version)

    def send(self, version: int, verify: bool = False) -> dict[str, float]:
        """Send the actor's current weights, those after step `version`. Returns metrics of the sync. Collective."""
        self.version, self.asleep, self.name = version, False, ""
        for model in self.offloaded:
            model.training_state.offload()
        self.engine.wake(cache=False)
        sent: dict[str, int] | None = {} if self.named else None
        metrics = send(self._stream(), self.engine, version, verify, sent)
        self.engine.wake()
        self.engine.recover()
        self.name = f"{version:06d}_{request_seed(*map(str, sorted(sent.items()))):016x}" if sent else ""
        return metrics
