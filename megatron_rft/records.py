"""The types that packages share, and the legend of shape letters.

    B  sequences of a batch            P  prompt tokens of all sequences, end to end
    G  responses per prompt            R  response tokens of all sequences, end to end
    V  vocabulary                      T  tokens of a packed micro-batch (prompts, responses, padding)
    H  hidden size

A batch is *ragged*: sequences lie end to end, without padding. Two sequences with prompts (5 6) and (7), responses
(8 9 2) and (2), and end-of-sequence token 2 are

    prompt_ids    = [5, 6, 7]       prompt_lens   = [2, 1]
    response_ids  = [8, 9, 2, 2]    response_lens = [3, 1]
    tokens["old_logprobs"] has shape [R] = [4], sequences["rewards"] has shape [B] = [2]

An episode is one sequence, also if the model reads it in several segments, such as a conversation and the summary that
replaces it. So what counts, averages or compares sequences, does so with episodes. Its response has the turns of all
segments in the order of sampling, and before the first turn of a later segment that segment's prompt, with mask 0. Only
`by_segment` tells segments apart, for the model's inputs.

A batch is small (a few bytes per token), so every rank holds the whole global batch and computes credit assignment,
filters and PIPO's statistics identically.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron_rft.responses import SHOWN, Prompt, Response, Score

__all__ = ["Batch", "Prompt", "Response", "Score"]


def flat(lists: Sequence[Sequence[int | float]], dtype: torch.dtype = torch.long) -> Tensor:
    """Lists or arrays of numbers, end to end."""
    arrays = [np.asarray(each) for each in lists if len(each)]
    return torch.from_numpy(np.concatenate(arrays or [np.zeros(0)])).to(dtype)


def segment_ids(lens: Tensor) -> Tensor:
    """[B] lengths -> [sum] the sequence each token belongs to: (3, 1) -> (0, 0, 0, 1)."""
    return torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens)


def offsets(lens: Tensor) -> Tensor:
    """(3, 2) -> (0, 1, 2, 0, 1)"""
    return indices(torch.zeros_like(lens), lens)


def indices(starts: Tensor, lens: Tensor) -> Tensor:
    """The places of segments that begin at `starts`: (10, 20), (3, 2) -> (10, 11, 12, 20, 21)."""
    ids = segment_ids(lens)
    return torch.arange(len(ids)) + (starts - (lens.cumsum(0) - lens))[ids]


def send(values: Tensor, device: torch.device) -> Tensor:
    """`values` on a device. The copy to a GPU is asynchronous, from pinned memory."""
    if device.type != "cuda" or not values.is_cpu:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def like(values: Tensor, other: Tensor) -> Tensor:
    """`values` in the dtype and on the device of `other`, like `values.to(other)` but without waiting for a GPU."""
    return send(values.to(other.dtype), other.device)


def take_segments(values: Tensor, lens: Tensor, index: Tensor) -> Tensor:
    """The segments `index` of `values` (segments of lengths `lens`, end to end), in that order."""
    return values[indices((lens.cumsum(0) - lens)[index], lens[index])]


class Support(NamedTuple):
    """The tokens that truncated sampling kept for N tokens, end to end. A token without any has the whole
    vocabulary."""

    ids: Tensor  # [K]
    lens: Tensor  # [N]


OPTIONAL = ("context_ids", "context_lens", "refined_ids", "refined_lens")
RAGGED = ("prompt_ids", "prompt_lens", "response_ids", "response_lens", *OPTIONAL)
PAIRS = tuple(zip(RAGGED[::2], RAGGED[1::2], strict=True))  # ids, and lengths by sequence
OWN = (*RAGGED, "support_ids", "support_lens", "segment_of")  # all fields but the named values


@dataclass(frozen=True)
class Batch:
    """A ragged batch of (prompt, response) sequences with named values per response token and per sequence.

    Names in use, `tokens` [R]: response_mask (1 where the policy wrote the token), rollout_logprobs (engine),
    turn_rewards (an episode's, on the last token of each turn), old_logprobs (trainer, before the step), ref_logprobs,
    teacher_logprobs, values, advantages, returns.
    `sequences` [B]: group (same number: same prompt), rewards (the verifier's), shaping (added to them),
    prompt_index, finished, weight_version, no_gradient (training need not compute it: Update in objectives/base.py),
    route (key of the experts that the engine used, in rollout/routes.py; -1: none),
    images (key of the images, which the ranks that compute them look up; -1: none; later segments of an episode that
    was shown some have the next keys).
    A context is another prompt for the same response, such as a teacher's prompt with feedback; length 0: none.
    A refined response is a better response to the same prompt; length 0: none.
    With truncated sampling (top-k, top-p, min-p) every model's distribution of a response token is over its support,
    the tokens that the engine kept; length 0: over the whole vocabulary.
    Sequences of one `unit` (pairs) stay in one micro-batch; default: each sequence is a unit.
    `scalars`: values of the whole batch, such as sampled_reward_sum and sampled_count before any filter.
    """

    prompt_ids: Tensor  # [P] int64
    prompt_lens: Tensor  # [B] int64
    response_ids: Tensor  # [R] int64
    response_lens: Tensor  # [B] int64
    tokens: dict[str, Tensor] = field(default_factory=dict)
    sequences: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)
    context_ids: Tensor | None = None  # [C] int64
    context_lens: Tensor | None = None  # [B] int64
    refined_ids: Tensor | None = None  # [D] int64
    refined_lens: Tensor | None = None  # [B] int64
    support_ids: Tensor | None = None  # [K] int32
    support_lens: Tensor | None = None  # [R] int32
    # [R] int32 the segment of each response token: 0, 1 ... in its sequence; -s in the prompt of segment s > 0. None: 0
    segment_of: Tensor | None = None

    def __post_init__(self):
        for name, value in self.tokens.items():
            assert len(value) == len(self.response_ids), f"{name}: {len(value)} values, {len(self.response_ids)} tokens"
        for name, value in self.sequences.items():
            assert len(value) == len(self), f"{name}: {len(value)} values, {len(self)} sequences"

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], **named: Any) -> "Batch":
        """From lists or arrays of token ids; `tokens=`, `sequences=` and `scalars=` as in the class."""
        assert len(prompts) == len(responses), f"{len(prompts)} prompts, {len(responses)} responses"
        lens = [torch.tensor([len(ids) for ids in many], dtype=torch.long) for many in (prompts, responses)]
        return cls(flat(prompts), lens[0], flat(responses), lens[1], **named)

    def __len__(self) -> int:
        return len(self.response_lens)

    @property
    def lengths(self) -> Tensor:
        """[B] tokens of prompt and response together."""
        return self.prompt_lens + self.response_lens

    @property
    def sequence_ids(self) -> Tensor:
        """[R] the sequence each response token belongs to."""
        return segment_ids(self.response_lens)

    @property
    def prompt_numbers(self) -> Tensor:
        """[B] equal numbers for equal prompts, with the same images: 0 1 2 ... in the order in which they first
        appear."""
        ids, known = self.prompt_ids.numpy(), {}
        ends = zip(self.prompt_lens.cumsum(0).tolist(), self.prompt_lens.tolist(), self.images.tolist(), strict=True)
        prompts = [(ids[end - length : end].tobytes(), images) for end, length, images in ends]
        numbers = [known.setdefault(prompt, len(known)) for prompt in prompts]
        return torch.tensor(numbers, dtype=torch.long)

    @property
    def images(self) -> Tensor:
        """[B] the key of each prompt's images, -1 without any."""
        keys = self.sequences.get("images")
        return torch.full((len(self),), -1) if keys is None else keys

    @property
    def response_mask(self) -> Tensor:
        """[R] float, 1 on tokens that the policy wrote. Default: all."""
        mask = self.tokens.get("response_mask")
        return torch.ones(len(self.response_ids)) if mask is None else mask

    @property
    def groups(self) -> Tensor:
        """[B] equal numbers for responses to one prompt. Default: the units."""
        return self.sequences.get("group", self.units)

    @property
    def shaped_rewards(self) -> Tensor:
        """[B] what training maximises: the verifier's reward plus shaping."""
        shaping = self.sequences.get("shaping")
        return self.sequences["rewards"] if shaping is None else self.sequences["rewards"] + shaping

    @property
    def units(self) -> Tensor:
        """[B] sequences of equal unit stay in one micro-batch."""
        unit = self.sequences.get("unit")
        return torch.arange(len(self)) if unit is None else unit

    def with_tokens(self, **values: Tensor) -> "Batch":
        return replace(self, tokens={**self.tokens, **values})

    def without_tokens(self, name: str) -> "Batch":
        return replace(self, tokens={k: v for k, v in self.tokens.items() if k != name})

    def without_sequences(self, name: str) -> "Batch":
        return replace(self, sequences={k: v for k, v in self.sequences.items() if k != name})

    def with_sequences(self, **values: Tensor) -> "Batch":
        return replace(self, sequences={**self.sequences, **values})

    def with_contexts(self, contexts: list[list[int]]) -> "Batch":
        """Add another prompt for each response; an empty list means none."""
        ids, lens = self._flat(contexts)
        return replace(self, context_ids=ids, context_lens=lens)

    def with_refined(self, responses: list[list[int]]) -> "Batch":
        """Add a better response to each prompt; an empty list means none."""
        ids, lens = self._flat(responses)
        return replace(self, refined_ids=ids, refined_lens=lens)

    def with_supports(self, supports: list[tuple[tuple[int, ...], ...]]) -> "Batch":
        """Add the tokens that truncated sampling kept, by response and token."""
        ids = torch.tensor([i for tokens in supports for kept in tokens for i in kept], dtype=torch.int32)
        lens = torch.tensor([len(kept) for tokens in supports for kept in tokens], dtype=torch.int32)
        assert len(lens) == len(self.response_ids), f"{len(lens)} supports, {len(self.response_ids)} response tokens"
        return replace(self, support_ids=ids, support_lens=lens)

    def with_segments(self, segments: Sequence[Sequence[int]]) -> "Batch":
        """Add the segment of each response token, by response; an empty list means that all are of segment 0."""
        ends = self.response_lens.cumsum(0).tolist()
        segment_of = torch.zeros(len(self.response_ids), dtype=torch.int32)
        for end, given in zip(ends, segments, strict=True):
            segment_of[end - len(given) : end] = torch.as_tensor(given, dtype=torch.int32)
        return replace(self, segment_of=segment_of)

    @property
    def segment_counts(self) -> Tensor:
        """[B] the segments of each sequence, at least 1."""
        ones = torch.ones(len(self), dtype=torch.long)
        if self.segment_of is None:
            return ones
        return ones.scatter_reduce(0, self.sequence_ids, 1 + self.segment_of.long(), "amax")

    def by_segment(self) -> tuple["Batch", Tensor]:
        """What the model reads: the ids of prompts and responses, each segment as a sequence of its own, and [R'] the
        places of their response tokens in R. There the prompts of later segments are no response tokens."""
        return (self, torch.arange(len(self.response_ids))) if self.segment_of is None else self._by_segment()

    def _by_segment(self) -> tuple["Batch", Tensor]:
        assert self.segment_of is not None
        counts = self.segment_counts
        first = counts.cumsum(0) - counts
        segment = first[self.sequence_ids] + self.segment_of.abs()
        order = segment.argsort(stable=True)
        opens = self.segment_of[order] < 0
        prompts, places = order[opens], order[~opens]
        lens = torch.zeros(int(counts.sum()), dtype=torch.long)
        prompt_lens = lens.index_add(0, segment[prompts], torch.ones_like(prompts))
        prompt_lens = prompt_lens.index_copy(0, first, self.prompt_lens)
        number = segment_ids(prompt_lens)
        ids = torch.empty_like(number)
        of_first = torch.isin(number, first)
        ids[of_first], ids[~of_first] = self.prompt_ids, self.response_ids[prompts]
        number = offsets(counts)
        images = self.images.repeat_interleave(counts)
        images = torch.where(images >= SHOWN, images + number, images.where(number == 0, -1))
        sequences = {"images": images} if "images" in self.sequences else {}
        response_lens = segment[places].bincount(minlength=len(lens))
        return Batch(ids, prompt_lens, self.response_ids[places], response_lens, sequences=sequences), places

    def support_of(self, index: Tensor) -> Support:
        """The support of the response tokens `index`, positions in R."""
        found = self._supports(index)
        assert found, "a batch without supports"
        return Support(*(values.long() for values in found.values()))

    def _supports(self, index: Tensor) -> dict[str, Tensor]:
        if self.support_ids is None or self.support_lens is None:
            return {}
        ids = take_segments(self.support_ids, self.support_lens.long(), index)
        return {"support_ids": ids, "support_lens": self.support_lens[index]}

    def _flat(self, lists: list[list[int]]) -> tuple[Tensor, Tensor]:
        assert len(lists) == len(self), f"{len(lists)} lists of tokens, {len(self)} sequences"
        return flat(lists), torch.tensor([len(ids) for ids in lists], dtype=torch.long)

    def in_context(self) -> "Batch":
        """The same responses with their contexts as prompts. A response without a context keeps its prompt."""
        assert self.context_ids is not None and self.context_lens is not None, "a batch without contexts"
        missing = self.context_lens == 0
        lens = torch.stack([self.context_lens, torch.where(missing, self.prompt_lens, 0)])
        both = torch.cat([self.context_ids, take_segments(self.prompt_ids, self.prompt_lens, missing.nonzero()[:, 0])])
        order = torch.arange(2 * len(self)).view(2, -1).t().flatten()
        ids = take_segments(both, lens.flatten(), order)
        batch = replace(self, prompt_ids=ids, prompt_lens=lens.sum(0), context_ids=None, context_lens=None)
        return batch.without_sequences("route")  # another prompt has other experts

    def with_scalars(self, **values: float) -> "Batch":
        return replace(self, scalars={**self.scalars, **values})

    def only(self, tokens: set[str], sequences: set[str]) -> "Batch":
        """The same sequences and supports with only these named values, the response mask and the images, without
        contexts and refined responses."""
        tokens, sequences = tokens | {"response_mask"}, sequences | {"images"}
        return replace(
            self,
            tokens={k: v for k, v in self.tokens.items() if k in tokens},
            sequences={k: v for k, v in self.sequences.items() if k in sequences},
            **dict.fromkeys(OPTIONAL),
        )

    def select(self, index: Tensor) -> "Batch":
        """The sequences `index` (positions or a mask), in that order. `scalars` stay as they are."""
        index = index.nonzero().flatten() if index.dtype == torch.bool else index
        chosen = take_segments(torch.arange(len(self.response_ids)), self.response_lens, index)
        own = self._supports(chosen)
        if self.segment_of is not None:
            own["segment_of"] = self.segment_of[chosen]
        for ids, lens in PAIRS:
            if (values := getattr(self, ids)) is not None:
                of = getattr(self, lens)
                own |= {ids: take_segments(values, of, index), lens: of[index]}
        return Batch(
            **own,
            tokens={k: v[chosen] for k, v in self.tokens.items()},
            sequences={k: v[index] for k, v in self.sequences.items()},
            scalars=dict(self.scalars),
        )

    def with_response_tokens(self, chosen: Tensor) -> "Batch":
        """The same sequences with only some tokens of their responses. `chosen`: [R] bool."""
        lens = torch.zeros_like(self.response_lens).index_add_(0, self.sequence_ids, chosen.long())
        tokens = {name: values[chosen] for name, values in self.tokens.items()}
        kept = self._supports(chosen.nonzero().flatten())
        if self.segment_of is not None:
            kept["segment_of"] = self.segment_of[chosen]
        return replace(self, response_ids=self.response_ids[chosen], response_lens=lens, tokens=tokens, **kept)

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """Flat tensors, for a safetensors file; `from_state_dict` is the inverse."""
        own = {name: getattr(self, name) for name in OWN if getattr(self, name) is not None}
        scalars = {k: torch.tensor(v, dtype=torch.float64) for k, v in self.scalars.items()}
        parts = {"tokens": self.tokens, "sequences": self.sequences, "scalars": scalars}
        named = {f"{part}.{k}": v for part, values in parts.items() for k, v in values.items()}
        return {prefix + k: v.contiguous() for k, v in (own | named).items()}

    @classmethod
    def from_state_dict(cls, state: dict[str, Tensor], prefix: str = "") -> "Batch":
        state = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}

        def part(kind: str) -> dict[str, Tensor]:
            return {k.removeprefix(f"{kind}."): v for k, v in state.items() if k.startswith(f"{kind}.")}

        scalars = {k: v.item() for k, v in part("scalars").items()}
        own = {name: state[name] for name in OWN if name in state}
        return cls(**own, tokens=part("tokens"), sequences=part("sequences"), scalars=scalars)


def concatenate(batches: list[Batch]) -> Batch:
    """One batch of all sequences, in order. All batches must have the same named values; `scalars` are summed."""
    first = batches[0]
    if len(batches) == 1:
        return first
    for other in batches[1:]:
        assert set(other.tokens) == set(first.tokens) and set(other.sequences) == set(first.sequences)
    if any(batch.segment_of is not None for batch in batches):
        none = [()] * max(map(len, batches))
        batches = [b if b.segment_of is not None else b.with_segments(none[: len(b)]) for b in batches]
        first = batches[0]
    present = [name for name in OWN if getattr(first, name) is not None]
    return Batch(
        **{name: torch.cat([getattr(b, name) for b in batches]) for name in present},
        tokens={k: torch.cat([b.tokens[k] for b in batches]) for k in first.tokens},
        sequences={k: torch.cat([b.sequences[k] for b in batches]) for k in first.sequences},
        scalars={k: sum(b.scalars.get(k, 0.0) for b in batches) for k in set().union(*(b.scalars for b in batches))},
    )
