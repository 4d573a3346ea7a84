"""The interface of a generation engine, whether it runs in this process, in another process, or behind a URL.

An engine takes token ids and returns token ids: nothing is re-tokenised. Results are an iterator of groups in the order
in which they finish, so that rewards and refinement of early groups overlap with the generation of later ones. Weights
arrive as one stream of tensors with HF names; every response carries the version of the weights that started it.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rft.records import Prompt, Response
from megatron_rft.utils.errors import DataError, RunFailed, UserError


class WeightValidator:
    """Checks the tensors of a stream, also against the streams that were accepted."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], model_type: str):
        """`shapes`: the HF name and shape of every tensor that a stream must have."""
        self.shapes, self.model_type = shapes, model_type
        self.before: dict[str, tuple[torch.dtype, bool]] = {}  # name -> dtype, whether it was all zero

    def checked(self, stream: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Begin a stream. Yields its tensors without those that are refused for their name, shape or dtype."""
        self._now: dict[str, torch.dtype] = {}
        self._ranges: list[Tensor] = []  # [2] least and greatest value of each tensor of the stream, on its device
        self._refused: str | None = None  # the first problem of a tensor of the stream
        for name, tensor in stream:
            if problem := self._problem_of(name, tensor):
                self._refused = self._refused or problem
            else:
                yield name, tensor

    def _problem_of(self, name: str, tensor: Tensor) -> str | None:
        """Return the problem of the next tensor of the stream, or None. Its values are read, but not waited for."""
        shape = self.shapes.get(name)
        if shape is None:
            return f"{name} is no tensor of this {self.model_type} model"
        if name in self._now:
            return f"{name} came twice"
        if tensor.shape != shape:
            return f"{name} has shape {tuple(tensor.shape)}, the engine's has {tuple(shape)}"
        dtype, _ = self.before.get(name, (None, True))
        if not tensor.dtype.is_floating_point or dtype not in (None, tensor.dtype):
            before = f"; it was {dtype}" if dtype else ", which no weight is"
            return f"{name} is {tensor.dtype}{before}"
        self._now[name] = tensor.dtype
        self._ranges.append(torch.stack(torch.aminmax(tensor.detach())).float())
        return None

    def end(self) -> str | None:
        """Return the first problem of the stream that has ended, or None: then the next one is compared with it. Waits
        for the device once."""
        missing = [name for name in self.shapes if name not in self._now]
        if self._refused or missing:
            return self._refused or f"{missing[0]} is missing ({len(missing)} of {len(self.shapes)} tensors are)"
        now, ends = {}, torch.stack(self._ranges).tolist() if self._ranges else []
        for (name, dtype), (least, most) in zip(self._now.items(), ends, strict=True):
            if not abs(least) + abs(most) < float("inf"):  # NaN included
                return f"{name} has non-finite values"
            now[name] = dtype, least == most == 0
            if now[name][1] and not self.before.get(name, now[name])[1]:
                return f"{name} is all zero, and was not before"
        self.before |= now
        return None


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. If they truncate the distribution, to the `top_k` most probable tokens, of these to those at
    least `min_p` times as probable as the most probable one, and of these to the most probable ones with a mass of
    `top_p`, responses carry their `supports`: the trainer cannot know which tokens an engine kept."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    continues: bool = False  # the prompts continue those of the last call, whose keys and values may be reused
    routes: bool = False  # responses carry the experts of each token

    @property
    def truncates(self) -> bool:
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class Request:
    """`n` responses to one prompt. Response i has its own random stream, a function of (seed, i) alone. It depends
    neither on the rest of the batch nor on the number of engines."""

    id: int
    prompt_ids: tuple[int, ...]
    n: int
    seed: int
    max_tokens: int | None = None  # a lower limit than the sampling's, for this request
    problem: Prompt | None = None  # what the prompt asks, for environments; engines read its images alone


@dataclass(frozen=True)
class Group:
    """All responses to one request."""

    id: int
    responses: tuple[Response, ...]


Generate = Callable[[list[Request], Sampling], Iterator[Group]]
EngineBuild = Callable[[torch.device | str], "Engine"]


class EngineLost(RunFailed):
    """An engine was killed, has crashed or hangs. `pool.py` can replace it."""


class Engine(ABC):
    """Calls come from one thread. `generate` may be called again only when its iterator is exhausted or closed.

    Where an engine can, it calls `on_step` between the steps of generation. This is its heartbeat, and the only moment
    at which `load_weights` may be called while an iterator of `generate` is open: unfinished responses then continue
    with the new weights and the old cache, and keep the version of their first token.
    """

    dtype: torch.dtype  # of its weights
    on_step: Callable[[], None] | None = None
    reload: Callable[[], object] | None = None  # by which `recover` sends the actor's weights
    joins = False
    """Whether requests may join those that are being generated: through `add`, or, if the engine is outside of the
    ranks, by calls of `generate` from several threads."""
    ranks: int = 1
    """Consecutive ranks of the trainer that form this engine. They make all calls together; the first of them passes
    requests and gets groups, the others pass none."""

    @abstractmethod
    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        """Yield one group for each request, in the order in which they finish."""

    @abstractmethod
    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load every parameter of the model from the stream. Always read it to its end, because it runs collectives.

        Raises:
            RunFailed: a tensor is missing, repeated, unknown, has another shape, is not finite, or is all zero and was
                not before. The message names it.
        """

    @abstractmethod
    def checksums(self) -> dict[str, int | None]:
        """Return the `checksum` of every parameter in the engine by HF name, to verify a sync. None stands for a
        parameter that the engine rounds, and has compared with the received values itself.

        The result is empty on a rank without an engine, and for a lost engine that will be replaced."""

    def add(self, requests: list[Request]) -> None:
        """Called by `on_step` of an engine that `joins`: generate these too, with the same sampling."""
        raise NotImplementedError

    def agree(self, value: Any) -> Any:
        """Return the `value` of the engine's first rank, on all of its ranks."""
        return value

    def driver(self) -> tuple[int | None, int]:
        """Return this rank's index among the ranks that drive an engine (None: it drives none), and their number."""
        number, follows = divmod(dist.get_rank(), self.ranks)
        return None if follows else number, dist.get_world_size() // self.ranks

    def statistics(self) -> dict[str, float]:
        """Return the metrics since the last call: of speculative decoding (acceptance.py), losses and episodes."""
        return {}

    def take_news(self) -> list[str]:
        """Return messages about engines that were replaced since the last call, for the log."""
        return []

    def recover(self) -> bool:
        """Replace the lost engines of all ranks. Returns whether there were any. Collective."""
        return False

    def sleep(self) -> None:
        """Free device memory until `wake`. Weights and caches may be lost: call `load_weights` after `wake`.
        Engines outside of the ranks do nothing."""

    def wake(self, cache: bool = True) -> None:
        """Takes the memory again. `cache`: False takes only that of the weights, so that these can be loaded while the
        device has little left; the cache's must follow before `generate`."""

    @abstractmethod
    def close(self) -> None:
        """End all processes and free all memory. May be called twice."""


@dataclass(frozen=True)
class EngineOptions:
    """The recipe's options for an engine in a process of the run. Each engine.py below `inference` has a function

        builder(config, dtype, options) -> Callable[[device], Engine]

    where `config` is the model's, and weights are loaded before the first `generate`. The result must be picklable,
    because it may be sent to another process: a partial of a class or of a module's function.
    """

    max_batch_sequences: int
    max_model_len: int  # tokens of a prompt and its response together
    options: dict[str, Any]  # the section `vllm`
    gpu_share: float | None  # share of the device's memory; None: no other process uses the device
    keep_caches: bool  # rollout.cache_after_sync=keep
    sleeps: bool  # `sleep` must free device memory
    reserve: int  # bytes of the device that an engine with a `gpu_share` leaves free


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
        if (largest := max(request.prompt_ids)) >= vocabulary:
            raise DataError(
                f"request {request.id}: token id {largest} in a vocabulary of {vocabulary}: the tokenizer does not fit "
                "the model"
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
