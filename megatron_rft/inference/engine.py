"""The protocol of a generation engine, whether it runs in this process, in another process, or behind a URL.

An engine takes token ids and returns token ids: nothing is re-tokenised. Results are an iterator of groups in the order
in which they finish, so that rewards and refinement of early groups overlap with the generation of later ones. Weights
arrive as one stream of tensors with HF names; every response carries the version of the weights that started it.
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
    """Sampling parameters. Recipes refuse top_p and top_k in training: the trainer cannot compute such log-probs."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """`n` responses to one prompt. Response i has its own random stream, a function of (seed, i) alone. It depends
    neither on the rest of the batch nor on the number of engines."""

    id: int
    prompt_ids: tuple[int, ...]
    n: int
    seed: int
    max_tokens: int | None = None  # a lower limit than the sampling's, for this request
    draft: tuple[int, ...] = ()  # predicted response for speculative decoding: changes the speed, never the tokens


@dataclass(frozen=True)
class Group:
    """All responses to one request."""

    id: int
    responses: tuple[Response, ...]


class EngineLost(RunFailed):
    """An engine was killed, has crashed or hangs. `pool.py` can replace it."""


class Engine(Protocol):
    """Calls come from one thread. `generate` may be called again only when its iterator is exhausted or closed.

    Where an engine can, it calls `on_step` between the steps of generation. This is its heartbeat, and the only moment
    at which `load_weights` may be called while an iterator of `generate` is open: unfinished responses then continue
    with the new weights and the old cache, and keep the version of their first token.
    """

    weight_version: int
    dtype: torch.dtype  # of its weights
    on_step: Callable[[], None] | None = None
    ranks: int = 1
    """Consecutive ranks of the trainer that form this engine. They make all calls together; the first of them passes
    requests and gets groups, the others pass none."""

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        """Yield one group for each request, in the order in which they finish."""
        ...

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load every parameter of the model from the stream. Always read it to its end, because it runs collectives.

        Raises:
            RunFailed: a tensor is missing, repeated, unknown, has another shape, is not finite, or is all zero and was
                not before. The message names it.
        """
        ...

    def checksums(self) -> dict[str, int | None]:
        """Return the `checksum` of every parameter in the engine by HF name, to verify a sync. None stands for a
        parameter that the engine rounds, and has compared with the received values itself.

        The result is empty on a rank without an engine, and for a lost engine that will be replaced."""
        ...

    def statistics(self) -> dict[str, float]:
        """Return the metrics of speculative decoding since the last call (acceptance.py); empty without it."""
        return {}

    def sleep(self) -> None:
        """Free device memory until `wake`. Weights and caches may be lost: call `load_weights` after `wake`.
        Engines outside of the ranks do nothing."""

    def wake(self, cache: bool = True) -> None:
        """Takes the memory again. `cache`: False takes only that of the weights, so that these can be loaded while the
        device has little left; the cache's must follow before `generate`."""

    def close(self) -> None:
        """End all processes and free all memory. May be called twice."""
        ...


@dataclass(frozen=True)
class EngineOptions:
    """The recipe's options for an engine in a process of the run. Each engine.py below `inference` has a function

        builder(source, dtype, options) -> Callable[[device], Engine]

    where `source` is a configuration or a folder with weights. The result must be picklable, because it may be sent to
    another process: a partial of a class or of a module's function.
    """

    max_batch_sequences: int
    max_model_len: int  # tokens of a prompt and its response together
    options: dict[str, Any]  # the section `vllm`
    gpu_share: float | None  # share of the device's memory; None: no other process uses the device
    keep_caches: bool  # rollout.cache_after_sync=keep
    sleeps: bool  # `sleep` must free device memory


def request_seed(*parts: int | str) -> int:
    """Return a seed of 63 bits that depends on `parts` alone: not on the rank, the layout or the machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def limit(request: Request, sampling: Sampling) -> int:
    return min(sampling.max_tokens, request.max_tokens or sampling.max_tokens)


def check_requests(requests: list[Request], sampling: Sampling, longest: int, room: str, vocabulary: int) -> None:
    """Raise UserError for a request that no engine can serve. `longest`: the limit on the tokens of a prompt and its
    response; `room`: how messages name the origin of that limit."""
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
    """Return a 64-bit checksum of a tensor's bits and their order; -0 counts as 0. Both sides of a sync compute it."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = 0
    for values in tensor.detach().contiguous().view(-1).split(1 << 22):  # int64 copies of a part at a time
        part = (values + 0.0 if values.element_size() > 1 else values).view(whole)
        odd = torch.arange(1, 2 * len(part), 2, device=part.device)
        total = (total * 0x100000001B3 + int((part.long() * odd).sum())) % 2**64
    return total
