"""The decode loop of the hf engine: continuous batching over a cache with shared prompts.

Each row of the batch is one response, and gets one token per step. When an eighth of the rows has finished, their
responses are returned, the remaining rows are compacted, and waiting requests are prefilled into the free rows.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megatron_rft.inference.engine import Group, Request, Sampling, limit
from megatron_rft.inference.hf.kv_cache import SharedPrefixCache, move
from megatron_rft.inference.hf.routes import Routes
from megatron_rft.records import Response
from megatron_rft.utils.position import here

PREFILL_TOKENS = 16384  # in one forward pass over prompts, padding included
GPU_STEPS_PER_CHECK = 8  # a check for finished rows makes the host wait for the device


def uniforms(seed: int, sample: int, count: int) -> np.ndarray:
    """Return `count` random numbers in [0, 1) for one response; they depend on (seed, sample) alone."""
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little"))).random(count, dtype=np.float32)


def choose(logits: Tensor, u: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample tokens: [L, V] logits, [L] uniform numbers -> [L] tokens, [L] log-probs under the sampled distribution,
    and [L, k] the ids that truncated sampling kept, -1 in the rest of a row, or None.

    Temperature 0 takes the largest logit, with its log-prob at temperature 1.
    """
    logits, ids = logits.float(), None
    if sampling.temperature == 0:
        logprobs = logits.log_softmax(-1)
        token = logits.argmax(-1, keepdim=True)
        return token[:, 0], logprobs.gather(-1, token)[:, 0], None
    logprobs = (logits / sampling.temperature).log_softmax(-1)
    if sampling.truncates:
        logprobs, ids = _truncate(logprobs, sampling)
    mass = logprobs.exp().cumsum(-1)  # [L, V], or [L, k]
    below_total = mass[:, -1:].nextafter(torch.zeros_like(mass[:, -1:]))  # since u * total may round up to total
    place = torch.searchsorted(mass, torch.minimum(u[:, None] * mass[:, -1:], below_total), right=True)
    token = place if ids is None else ids.gather(-1, place)
    kept = None if ids is None else ids.masked_fill(logprobs.isinf(), -1)
    return token[:, 0], logprobs.gather(-1, place)[:, 0], kept


def _truncate(logprobs: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """[L, V] log-probs -> [L, k] renormalised ones of the most probable tokens in order, and their ids. A token is kept
    if the more probable ones of the top_k have less mass than top_p, and if it is at least min_p times as probable as
    the first."""
    ordered, ids = logprobs.topk(min(sampling.top_k or logprobs.shape[-1], logprobs.shape[-1]), dim=-1)
    ordered = ordered.log_softmax(-1)
    probs = ordered.exp()
    cut = (probs.cumsum(-1) - probs >= sampling.top_p) | (probs < sampling.min_p * probs[:, :1])
    return ordered.masked_fill(cut, float("-inf")).log_softmax(-1), ids


@dataclass(frozen=True)
class BatchPart:
    """The responses of one request that are decoded together: all of them, or as many as the batch has rows."""

    request: Request
    samples: range

    @property
    def key(self) -> tuple[int, int]:
        return self.request.id, self.samples.start


class Decoder:
    """Decodes one list of requests. `forward(ids, positions, cache)` returns hidden states, `head` their logits."""

    def __init__(
        self,
        config,
        forward: Callable[[Tensor, Tensor, SharedPrefixCache], Tensor],
        head: Callable[[Tensor], Tensor],
        like: Tensor,
        requests: list[Request],
        sampling: Sampling,
        most_rows: int,
        weight_version: Callable[[], int],
        on_step: Callable[[], None] | None = None,
        routes: Routes | None = None,
    ):
        """`routes`: of the last call of `forward`, if responses are to carry them."""
        self.forward, self.head, self.sampling, self.weight_version = forward, head, sampling, weight_version
        self.routes = routes
        self.on_step = on_step
        self.device = like.device
        self.stop = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=self.device)
        longest_first = sorted(requests, key=lambda r: (-len(r.prompt_ids), r.id))
        self.waiting = deque(
            BatchPart(r, range(first, min(first + most_rows, r.n)))
            for r in longest_first
            for first in range(0, r.n, most_rows)
        )
        self.answers: dict[int, list[Response | None]] = {r.id: [None] * r.n for r in requests}
        rows = min(most_rows, sum(r.n for r in requests))
        self.width = max(len(part.samples) for part in self.waiting)
        groups = min(len(self.waiting), rows)
        tokens = max(limit(r, sampling) for r in requests)
        self.cache = SharedPrefixCache(
            config, groups, self.width, rows, (len(longest_first[0].prompt_ids), tokens), like
        )
        self.parts: list[BatchPart] = []  # one for each live group
        self.owners: list[tuple[Request, int, int]] = []  # (request, sample, weight version) for each live row
        self.most_rows = rows

        def column(*shape: int, dtype=torch.long) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=self.device)

        # One entry for each row. `count`: tokens written so far. A row that is done no longer changes.
        self.slot, self.prompt_len, self.count, self.limit, self.last = (column() for _ in range(5))
        self.done = column(dtype=torch.bool)
        self.u = column(tokens + 1, dtype=torch.float32)  # one column more: finished rows still write, into the last
        self.tokens, self.logprobs = column(tokens + 1), column(tokens + 1, dtype=torch.float32)
        kept = min(sampling.top_k or config.vocab_size, config.vocab_size) if sampling.truncates else 0
        self.supports = column(tokens + 1, kept, dtype=torch.int32)  # -1 where a token has fewer
        experts = routes.width if routes else 0  # of a token, over all layers
        self.experts = column(tokens + 1, experts, dtype=torch.int16)
        self.prompt_experts: dict[tuple[int, int], np.ndarray] = {}  # by `BatchPart.key`: [prompt tokens, experts]

    def run(self) -> Iterator[Group]:
        steps_per_check = GPU_STEPS_PER_CHECK if self.device.type == "cuda" else 1
        while self.waiting or self.owners:
            self._admit()
            ended = int(self.done[: len(self.owners)].sum())
            while ended == 0 or ended < len(self.owners) // 8:
                for _ in range(steps_per_check):
                    self._step()
                ended = int(self.done[: len(self.owners)].sum())
                here.move()
            yield from self._finished()
            self._compact()

    # --- prefill ---

    def _admit(self) -> None:
        first, entering = len(self.owners), []
        free = self.most_rows - first
        while self.waiting and len(self.waiting[0].samples) <= free:
            entering.append(self.waiting.popleft())
            free -= len(entering[-1].samples)
        if not entering:
            return
        group = len(self.parts)
        logits = torch.cat([self._prefill(group + start, parts) for start, parts in self._chunks(entering)])  # [n, V]
        sizes = torch.tensor([len(part.samples) for part in entering], device=self.device)
        self.cache.enter(first, sizes)
        self._register(entering)
        self._write(slice(first, len(self.owners)), logits.repeat_interleave(sizes, dim=0))
        self._measure()

    def _prefill(self, group: int, parts: list[BatchPart]) -> Tensor:
        """Write the prompts' keys and values into the cache. Returns [n, V] logits of the first response tokens."""
        prompts = [torch.tensor(part.request.prompt_ids) for part in parts]
        ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True).to(self.device)  # [n, S]
        self.cache.begin_prefill(group, len(parts))
        hidden = self.forward(ids, torch.arange(ids.shape[1], device=self.device)[None], self.cache)  # [n, S, H]
        if self.routes:
            found = self.routes.last().view(*ids.shape, -1).numpy(force=True)  # [n, S, experts]
            for part, experts in zip(parts, found, strict=True):
                self.prompt_experts[part.key] = experts[: len(part.request.prompt_ids)]
        return self.head(hidden[torch.arange(len(parts)), torch.tensor([len(prompt) - 1 for prompt in prompts])])

    def _chunks(self, parts: list[BatchPart]) -> Iterator[tuple[int, list[BatchPart]]]:
        """Split `parts`, longest prompts first, into prefills of about PREFILL_TOKENS: (index of the first, parts). A
        delta net's state would go on through padding, so its prompts are of one length."""
        first = 0
        while first < len(parts):
            length = len(parts[first].request.prompt_ids)
            count = max(1, PREFILL_TOKENS // length)
            if self.cache.row_states:
                count = min(count, sum(len(part.request.prompt_ids) == length for part in parts[first:]))
            yield first, parts[first : first + count]
            first += count

    def _register(self, entering: list[BatchPart]) -> None:
        """Add rows for all samples of the parts after the live rows."""
        new, owners, slots, version = len(self.owners), [], [], self.weight_version()
        for group, part in enumerate(entering, len(self.parts)):
            owners += [(part.request, sample, version) for sample in part.samples]
            slots += range(group * self.width, group * self.width + len(part.samples))
        limits = [limit(request, self.sampling) for request, *_ in owners]
        drawn = np.zeros((len(owners), self.u.shape[1]), dtype=np.float32)
        for row, (request, sample, _), most in zip(drawn, owners, limits, strict=True):
            row[:most] = uniforms(request.seed, sample, most)
        self.parts += entering
        self.owners += owners
        self.slot[new : len(self.owners)] = torch.tensor(slots)
        self.prompt_len[new : len(self.owners)] = torch.tensor([len(request.prompt_ids) for request, *_ in owners])
        self.limit[new : len(self.owners)] = torch.tensor(limits)
        self.u[new : len(self.owners)] = torch.from_numpy(drawn)
        self.count[new : len(self.owners)], self.done[new : len(self.owners)] = 0, False

    # --- decoding ---

    def _step(self) -> None:
        if self.on_step:
            self.on_step()
        live = slice(0, len(self.owners))
        prompt_len, count = self.prompt_len[live], self.count[live]
        self.cache.begin_decode(self.slot[live], prompt_len, count, self.spans)
        hidden = self.forward(self.last[live, None], (prompt_len + count - 1)[:, None], self.cache)  # [L, 1, H]
        if self.routes:  # of the token that was fed
            self.experts[torch.arange(len(count), device=self.device), count - 1] = self.routes.last()
        self._write(live, self.head(hidden[:, 0]))
        self.spans = (*self.spans[:2], min(self.spans[2] + 1, self.u.shape[1] - 1))

    def _write(self, rows: slice, logits: Tensor) -> None:
        """Append a token to each of `rows`. Finished rows write after their end, where nothing is read."""
        count, done = self.count[rows], self.done[rows]
        at = count[:, None]
        token, logprob, support = choose(logits, self.u[rows].gather(1, at)[:, 0], self.sampling)
        if support is not None:
            self.supports[rows].scatter_(1, at[..., None].expand(-1, 1, support.shape[1]), support[:, None].int())
        self.tokens[rows].scatter_(1, at, token[:, None])
        self.logprobs[rows].scatter_(1, at, logprob[:, None])
        self.last[rows] = torch.where(done, self.last[rows], token)
        count += ~done
        done |= torch.isin(token, self.stop) | (count >= self.limit[rows])

    def _measure(self) -> None:
        """Update `spans`, the used extent of the caches: groups, columns of prompts, columns of responses."""
        live = slice(0, len(self.owners))
        self.spans = (
            len(self.parts),
            max((len(part.request.prompt_ids) for part in self.parts), default=0),
            int(self.count[live].max()) if self.owners else 0,
        )

    # --- finished rows ---

    def _finished(self) -> Iterator[Group]:
        """Turn finished rows into responses. Yields a group for each request that is complete."""
        ended = self.done[: len(self.owners)].nonzero()[:, 0]
        counts, lasts = self.count[ended].tolist(), self.last[ended].tolist()
        tokens, logprobs = self.tokens[ended].tolist(), self.logprobs[ended].tolist()
        for row, count, last, ids, lps in zip(ended.tolist(), counts, lasts, tokens, logprobs, strict=True):
            request, sample, version = self.owners[row]
            reason = "stop" if last in self.sampling.stop_token_ids else "length"
            supports = self._supports(row, count) if self.sampling.truncates else ()
            answer = Response(tuple(ids[:count]), tuple(lps[:count]), reason, version, supports)
            if self.routes:
                answer = replace(answer, routes=self._routes(row, count))
            self.answers[request.id][sample] = answer
            if None not in self.answers[request.id]:
                yield Group(request.id, tuple(self.answers.pop(request.id)))

    def _supports(self, row: int, count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(i for i in ids if i >= 0) for ids in self.supports[row, :count].tolist())

    def _routes(self, row: int, count: int) -> np.ndarray:
        """[prompt + count - 1, layers, experts per token]"""
        part = self.parts[int(self.slot[row]) // self.width]
        response = self.experts[row, : count - 1].numpy(force=True)
        return self.routes.by_layer(np.concatenate([self.prompt_experts[part.key], response]))

    def _compact(self) -> None:
        """Move the last live rows and groups into the positions of finished ones."""
        keep = (~self.done[: len(self.owners)]).tolist()
        to, source = fill_holes(keep)
        if to:
            move(self.cache.keys, self.cache.values, to, source, self.spans[2])
            for column in (self.slot, self.prompt_len, self.count, self.limit, self.last, self.done):
                column[to] = column[source]
            for table in (self.u, self.tokens, self.logprobs, self.supports, self.experts):
                table[to] = table[source]
        self.cache.keep(to, source, sum(keep))
        _compact_list(self.owners, to, source, sum(keep))
        self._compact_groups()
        self._measure()

    def _compact_groups(self) -> None:
        slots = self.slot[: len(self.owners)]
        used = set((slots // self.width).tolist())
        keep = [group in used for group in range(len(self.parts))]
        to, source = fill_holes(keep)
        if to:
            move(self.cache.prompt_keys, self.cache.prompt_values, to, source, self.spans[1])
            new_group = torch.arange(len(keep), device=self.device)
            new_group[source] = torch.tensor(to, device=self.device)
            slots.copy_(new_group[slots // self.width] * self.width + slots % self.width)
        _compact_list(self.parts, to, source, sum(keep))


def fill_holes(keep: list[bool]) -> tuple[list[int], list[int]]:
    """Return moves (to, source) after which the kept entries come first. [1, 0, 0, 1, 1] -> ([1, 2], [3, 4])."""
    count = sum(keep)
    holes = [i for i in range(count) if not keep[i]]
    return holes, [i for i in range(count, len(keep)) if keep[i]]


def _compact_list(entries: list, to: list[int], source: list[int], count: int) -> None:
    for hole, entry in zip(to, source, strict=True):
        entries[hole] = entries[entry]
    del entries[count:]
