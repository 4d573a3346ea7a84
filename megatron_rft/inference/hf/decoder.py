"""The decode loop of the hf engine, on the forward pass and the cache of transformers.

Responses are decoded in waves. A wave computes its prompts once, padded on the left to the same length. In fp32 on a
CPU the responses of a prompt share its keys and values, elsewhere each gets a copy. Then each response gets one token
per step until it ends. Rows that have ended are computed until they are an eighth of the wave: to leave one out, the
whole cache is copied.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from megatron_rft.inference.engine import Group, Request, Sampling, limit
from megatron_rft.inference.hf import attention
from megatron_rft.megatron.images import rope_positions
from megatron_rft.records import Response
from megatron_rft.utils.position import here

PREFILL_TOKENS = 16384  # in one forward pass over prompts, padding included


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
    """[L, V] log-probs -> [L, k] renormalised ones of the most probable tokens in order, and their ids. Of the top_k,
    those at least min_p times as probable as the first are taken, and of these a token is kept if the more probable
    ones have less mass than top_p: vLLM's order."""
    ordered, ids = logprobs.topk(min(sampling.top_k or logprobs.shape[-1], logprobs.shape[-1]), dim=-1)
    probs = ordered.exp()
    ordered = ordered.masked_fill(probs < sampling.min_p * probs[:, :1], float("-inf")).log_softmax(-1)
    probs = ordered.exp()
    cut = probs.cumsum(-1) - probs >= sampling.top_p
    return ordered.masked_fill(cut, float("-inf")).log_softmax(-1), ids


def seen_by(
    problems: list[Any], prompts: list[Tensor], mask: Tensor, config: Any
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return the model's inputs for the images of `problems`, the positions of their `prompts` ([L, S], or [3, L, S]
    with images), and by how much images change the positions behind them [L]."""
    positions, later = (mask.cumsum(1) - 1).clamp(min=0), torch.zeros(len(mask), dtype=torch.long, device=mask.device)
    pictures = [problem.images if problem and problem.images_key >= 0 else None for problem in problems]
    if not any(pictures):
        return {}, positions, later
    positions, token = positions.expand(3, *positions.shape).clone(), config.image_token_id
    for number, (each, ids) in enumerate(zip(pictures, prompts, strict=True)):
        if each:
            own = rope_positions(ids.cpu(), list(each.grids), token, config.vision_config.spatial_merge_size)
            positions[:, number, -len(ids) :] = own.to(mask.device)
            later[number] = own.max() + 1 - len(ids)
    shown = [each for each in pictures if each]
    ids = pad_sequence(prompts, True, padding_side="left", padding_value=0)
    inputs = {
        "pixel_values": torch.cat([each.pixels() for each in shown]).to(mask.device),
        "image_grid_thw": torch.tensor([grid for each in shown for grid in each.grids], device=mask.device),
        "mm_token_type_ids": (ids == token).int(),
    }
    return inputs, positions, later


@dataclass
class Unfinished:
    """A response that is being decoded."""

    request: Request
    sample: int
    limit: int
    supports: list[tuple[int, ...]] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)  # [tokens, layers, experts of one]: the prompt's, then one


@dataclass
class Decoder:
    """Decodes with the model of `engine`, an HFEngine, up to its `max_batch_sequences` responses in a wave."""

    engine: Any
    sampling: Sampling

    def run(self, requests: list[Request]) -> Iterator[Group]:
        """Rows with similar limits and prompts share a wave, so that they end together and need little padding."""
        ordered = sorted(requests, key=lambda r: (-limit(r, self.sampling), -len(r.prompt_ids), r.id))
        rows = [Unfinished(r, sample, limit(r, self.sampling)) for r in ordered for sample in range(r.n)]
        answers: dict[int, dict[int, Response]] = {r.id: {} for r in requests}
        most = self.engine.max_batch_sequences
        for first in range(0, len(rows), most):
            for row, response in self._wave(rows[first : first + most]):
                answer = answers[row.request.id]
                answer[row.sample] = response
                if len(answer) == row.request.n:
                    yield Group(row.request.id, tuple(answer[sample] for sample in range(row.request.n)))

    def _wave(self, rows: list[Unfinished]) -> Iterator[tuple[Unfinished, Response]]:
        """Yield the responses as they end."""
        steps, version, device = rows[0].limit, self.engine.weight_version, self.engine.model.device  # the most steps
        u = np.stack([uniforms(row.request.seed, row.sample, steps) for row in rows])
        u, limits = torch.from_numpy(u).to(device), torch.tensor([row.limit for row in rows], device=device)
        stops = torch.tensor(self.sampling.stop_token_ids, dtype=torch.long, device=device)
        logits, mask, later, cache = self._prefill(rows)  # [L, V], [L, S], [L]
        ids, logprobs = torch.zeros_like(u, dtype=torch.long), torch.zeros_like(u)  # [L, steps] what is sampled
        ended = torch.zeros_like(limits, dtype=torch.bool)
        for step in range(steps):
            ids[:, step], logprobs[:, step], supports = choose(logits, u[:, step], self.sampling)
            if supports is not None:
                for row, support in zip(rows, supports.tolist(), strict=True):
                    row.supports.append(tuple(i for i in support if i >= 0))
            before, tokens = ended, ids[:, step]
            ended = before | torch.isin(tokens, stops) | (limits == step + 1)
            if new := (ended & ~before).nonzero()[:, 0].tolist():
                for place in new:
                    written = ids[place, : step + 1], logprobs[place, : step + 1]
                    yield rows[place], self._response(rows[place], *(tuple(x.tolist()) for x in written), version)
                index = (~ended).nonzero()[:, 0]
                if not len(index):
                    return
                if len(index) <= len(rows) * 7 // 8:
                    rows = [rows[place] for place in index.tolist()]
                    given = tokens, ids, logprobs, ended, limits, mask, later, u
                    tokens, ids, logprobs, ended, limits, mask, later, u = (each[index] for each in given)
                    cache.reorder_cache(index)
            if self.engine.on_step:
                self.engine.on_step()
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            logits = self._logits(tokens[:, None], mask, cache, (mask.sum(1) - 1 + later)[:, None])
            if self.sampling.routes:
                for row, experts in zip(rows, self.engine.routes.last().numpy(force=True), strict=True):
                    row.experts.append(experts[None])  # of a row that has ended nobody reads them, nor supports
            here.move()

    def _prefill(self, rows: list[Unfinished]) -> tuple[Tensor, Tensor, Tensor, DynamicCache]:
        """Return for each row the logits of its first token [L, V], the mask of its prompt [L, S], by how much images
        change the positions behind it [L], and the cache."""
        requests, device = [row.request for row in rows], self.engine.model.device
        prompts = {each.id: torch.tensor(each.prompt_ids, device=device) for each in requests}
        places = {id: place for place, id in enumerate(prompts)}
        own = [places[row.request.id] for row in rows]
        ids = pad_sequence(list(prompts.values()), True, padding_side="left")  # [n, S]
        mask = pad_sequence([torch.ones_like(prompt) for prompt in prompts.values()], True, padding_side="left")
        cache = attention.cache(self.engine.model.config)
        shown = list({row.request.id: row.request.problem for row in rows}.values())
        seen, positions, later = seen_by(shown, list(prompts.values()), mask, self.engine.config)
        whole = ids.shape[1] if seen else max(1, PREFILL_TOKENS // len(ids))  # images are not cut
        for part in torch.arange(ids.shape[1]).split(whole):
            logits = self._logits(ids[:, part], mask[:, : part[-1] + 1], cache, positions[..., part], seen)
            if self.sampling.routes:
                experts, real = self.engine.routes.last().unflatten(0, (len(ids), len(part))), mask[:, part].bool()
                for row, place in zip(rows, own, strict=True):
                    row.experts.append(experts[place, real[place]].numpy(force=True))
        index = torch.tensor(own, device=ids.device)
        latent = hasattr(self.engine.model.config, "kv_lora_rank")  # what is cached are no keys
        if self.engine.takes_bias and not latent and len(own) > len(ids):
            shared = attention.Continuations(index)
            for layer in cache.layers:
                layer.share(shared)
        else:
            cache.reorder_cache(index)
        return logits[index], mask[index], later[index], cache

    def _logits(
        self, ids: Tensor, mask: Tensor, cache: DynamicCache, positions: Tensor, seen: dict[str, Tensor] | None = None
    ) -> Tensor:
        """[L, T] the next tokens and their positions ([3, L, T] with images), [L, S] the mask up to them -> [L, V]
        logits of those that follow."""
        if self.engine.never and positions.dim() == 2:
            positions = positions.expand(3, *positions.shape)
        options = {"position_ids": positions, "past_key_values": cache, "use_cache": True} | (seen or {})
        if ids.shape[1] == 1 and self.engine.takes_bias:  # transformers would make a mask anew for each
            mask = torch.zeros(mask.shape, dtype=torch.float32).masked_fill_(mask == 0, -torch.inf)[:, None, None]
        last = torch.tensor([-1], device=ids.device) if ids.shape[1] > 1 else 1  # for a slice torch copies the matrix
        logits = self.engine.model(input_ids=ids, attention_mask=mask, logits_to_keep=last, **options).logits[:, -1]
        if self.engine.never:
            logits[:, list(self.engine.never)] = float("-inf")
        return logits

    def _response(self, row: Unfinished, ids: tuple, logprobs: tuple, version: int) -> Response:
        routes = np.concatenate(row.experts) if row.experts else None
        reason = "stop" if ids[-1] in self.sampling.stop_token_ids else "length"
        return Response(ids, logprobs, reason, version, tuple(row.supports), routes=routes)
