"""What every generation engine can do, whoever runs it: in this process, in processes of its own, or behind a URL.

An engine takes token ids and gives token ids: nothing is ever re-tokenised. Results come as an iterator of *groups* in
the order in which they end, so that rewards and refinement of early ones overlap with late ones. Weights come as one
stream of HF-named tensors; every response says which version of them wrote it.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_rft.records import Response
from megatron_rft.utils.errors import DataError, RunFailed, UserError


@dataclass(frozen=True)
class Sampling:
    """How to sample. What the trainer cannot replay in its log-probs (top_p, top_k) is refused by the configuration."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """`n` responses to one prompt. Response i draws from its own random stream, a function of (seed, i) alone: it does
    not depend on what else is in the batch, nor on how many engines share the work."""

    id: int
    prompt_ids: tuple[int, ...]
    n: int
    seed: int
    max_tokens: int | None = None  # below the sampling's, for this request
    draft: tuple[int, ...] = ()  # of the response, for an engine with speculative decoding: changes speed, never tokens


@dataclass(frozen=True)
class Group:
    """All responses to one request."""

    id: int
    responses: tuple[Response, ...]


class EngineLost(RunFailed):
    """An engine that was killed, crashed or hangs. Another can be started in its place (`pool.py`)."""


class Engine(Protocol):
    """Calls come from one thread. `generate` may be called again only when its iterator is exhausted or closed.

    An engine that can calls `on_step` between the steps of generation. That is a sign of life, and the one moment at
    which `load_weights` may be called while an iterator of `generate` is open: what is being written then goes on with
    the new weights and the cache of the old, and keeps the version of its first token.
    """

    weight_version: int
    dtype: torch.dtype  # of its weights
    on_step: Callable[[], None] | None = None
    ranks: int = 1  # of the trainer's, in a row, that are this engine together
    """They call everything together. The first of them has requests and gets groups; the others ask for nothing."""

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        """Groups in the order in which they end; each request comes back exactly once."""
        ...

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take every parameter of the model from the stream. Each exactly once, or RunFailed naming the tensor.

        Also refused: a shape that is not the model's, values that are not finite, a tensor of zeros that was none
        before. The stream is read to its end in any case: its collectives involve every rank.
        """
        ...

    def checksums(self) -> dict[str, int | None]:
        """HF name -> `checksum` of every parameter as the engine holds it, for the proof of a sync. None: the engine
        rounds it, and has itself compared what it made of it with what came.

        Empty where nothing is behind it: on a rank without an engine, or when it was lost and will be replaced."""
        ...

    def statistics(self) -> dict[str, float]:
        """Metrics of what was generated since the last call, where an engine has any: of its drafts (acceptance.py)."""
        return {}

    def sleep(self) -> None:
        """Give device memory back until `wake`. Weights and caches may be lost: `load_weights` follows a wake. Engines
        outside of the ranks stay awake."""

    def wake(self) -> None: ...

    def close(self) -> None:
        """Leave no process and no memory behind. May be called twice."""
        ...


@dataclass(frozen=True)
class EngineOptions:
    """What a recipe says to an engine in a process of the run. Each engine.py below `inference` has a function

        builder(source, dtype, options) -> Callable[[device], Engine]

    where `source` is a configuration or a folder with weights. What it returns can be sent to another process: it is a
    partial of a class or of a module's function.
    """

    max_batch_sequences: int
    max_tokens: int  # of a prompt and its response together
    arguments: dict[str, Any]  # the section `vllm`
    gpu_share: float | None  # of the device's memory; None: the device is the engine's own
    keep_caches: bool  # rollout.cache_after_sync=keep
    sleeps: bool  # `sleep` must give device memory back


def request_seed(*parts: int | str) -> int:
    """63 bits that depend on `parts` alone: the same on every rank, in every layout, on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def limit(request: Request, sampling: Sampling) -> int:
    return min(sampling.max_tokens, request.max_tokens or sampling.max_tokens)


def check_requests(requests: list[Request], sampling: Sampling, longest: int, room: str, vocabulary: int) -> None:
    """What no engine can serve. `longest`: tokens of prompt and response together; `room` says whose bound that is."""
    assert len({r.id for r in requests}) == len(requests), "two requests have the same id"
    for request in requests:
        length, most = len(request.prompt_ids), limit(request, sampling)
        assert request.n >= 1 and most >= 1, request
        if length == 0:
            raise UserError(f"request {request.id} has an empty prompt: there is nothing to continue")
        if length + most > longest:
            raise UserError(
                f"request {request.id}: prompt of {length} tokens + up to {most} response tokens = {length + most}, "
                f"but {room}. Lower rollout.max_response_tokens or data.max_prompt_tokens"
            )
        if max(request.prompt_ids) >= vocabulary:
            raise DataError(
                f"request {request.id}: token id {max(request.prompt_ids)} in a vocabulary of {vocabulary}: "
                "the tokenizer does not fit the model"
            )


def checksum(tensor: Tensor) -> int:
    """64 bits of a tensor's bits and their order, where -0 counts as 0. Both sides of a weight sync compute it."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = 0
    for values in tensor.detach().contiguous().view(-1).split(1 << 22):  # int64 copies of a part at a time
        part = (values + 0.0 if values.element_size() > 1 else values).view(whole)
        odd = torch.arange(1, 2 * len(part), 2, device=part.device)
        total = (total * 0x100000001B3 + int((part.long() * odd).sum())) % 2**64
    return total
