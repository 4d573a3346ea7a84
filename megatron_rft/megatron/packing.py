"""Builds the model's inputs for one micro-batch of a ragged batch, packed or padded.

The last token of a sequence predicts nothing and is not fed. `rows` has, for each response token, the position whose
hidden state predicts it. Two sequences (x x y y) and (x y y y), x prompt and y response:

    packed     tokens x x y x y y        [1, T]    rows 1 2 3 4 5
    padded     tokens x x y / x y y      [b, S]    rows (row-major over [S, b]) 2 4 1 3 5

Packed sequences with the same prompt may share it: its tokens come once, before all of their responses. Two responses
(p q a b) and (p q c d e) to one prompt (p q), their last tokens b and e not fed:

    shared     tokens p q a c d          positions 0 1 2 2 3       rows 1 2 1 3 4

All parts of a layer but attention work token by token, so only attention handles shared prompts (`SharedPrompts`).
The model reads every token, but only the hidden states that predict tokens with a mask of 1 leave it (`_written`): what
an environment wrote reaches no head, no loss and no count.

Images come before everything else of a layer: `megatron/images.py` places them, and a token then has three positions.

This module uses no process group: `PackLayout` has the context-parallel rank and size and the padding multiples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_rft.megatron.images import Images, Seen
from megatron_rft.records import Batch, Support, indices, offsets, segment_ids, send, take_segments


@dataclass(frozen=True)
class PackLayout:
    """Constraints on a micro-batch's lengths: each sequence must be a multiple of 2 cp (zigzag context parallelism),
    the total a multiple of `total_multiple` per context-parallel rank (sequence parallelism, FP8). `share_prompts`
    needs packed sequences without context parallelism. `ends_on_host`: the ends of packed sequences stay in host
    memory, where torch's layers and megatron-core's rotary embedding read them in each layer; Transformer Engine's
    kernels read them on the device."""

    cp_size: int = 1
    cp_rank: int = 0
    total_multiple: int = 1
    packed: bool = True
    share_prompts: bool = False
    ends_on_host: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """The model's inputs. `batch`: with only the response tokens that losses see. `rows` [R_local]: positions in this
    rank's flattened hidden states; `kept` [R_local]: the response tokens (of the batch's R) that they predict. With
    context parallelism each rank has some of them. `batch` and `kept` are in host memory, everything else is on the
    device. megatron-core needs no position ids: rotary angles follow from `packed`, or from the columns."""

    batch: Batch
    token_ids: Tensor  # [1, T_local] or [b, S_local]
    packed: PackedSeqParams | None
    rows: Tensor  # [R_local]
    kept: Tensor  # [R_local]
    # of a model with routers: [tokens of this rank in the model's order S x b] the sequences that have each token; 0 in
    # padding
    uses: Tensor | None = None
    routes: Tensor | None = None  # [tokens likewise, layers, experts per token] int16

    @property
    def targets(self) -> Tensor:
        """[R_local] the ids of the predicted tokens"""
        return self.batch.response_ids[self.kept]

    @property
    def support(self) -> Support | None:
        """That of the targets."""
        return None if self.batch.support_lens is None else self.batch.support_of(self.kept)

    def select(self, index: Tensor) -> "MicroBatch":
        """With some of the predicted tokens: `index`, positions in R_local."""
        return replace(self, rows=self.rows[send(index, self.rows.device)], kept=self.kept[index])


@dataclass
class Packed(PackedSeqParams):
    """Packed sequences whose tokens have positions of their own. [T] or, with images, [3, T] in time, height and width,
    of the tokens of all context-parallel ranks."""

    position_ids: Tensor | None = None
    seen: Seen | None = None


@dataclass
class SharedPrompts(Packed):
    """A packed micro-batch in which responses share prompts.

    The inherited fields describe one long sequence, which is what megatron-core's rotary embedding must see. Attention
    reads `segments` and `groups`. In the example above: segments (0, 2, 3, 5), groups ((0, 2, 5),).
    """

    # Ends of the segments within which tokens attend causally: a prompt, a response, or a prompt with its only
    # response. Begins with 0.
    segments: tuple[int, ...] = ()
    # (a, b, c): the tokens b ... c - 1 also attend to all of a ... b - 1, their prompt.
    groups: tuple[tuple[int, int, int], ...] = ()

    @cached_property
    def gathered(self) -> tuple[Tensor, tuple[int, ...]]:
        """The same as one variable-length attention call with a bottom-right causal mask: the tokens of the
        concatenated keys, and the ends of each segment's keys. In the example: (0 1 0 1 2 0 1 3 4), (0, 2, 5, 9)."""
        keys = []
        for start, end in pairwise(self.segments):
            prompt = next(((a, b) for a, b, c in self.groups if b <= start < c), (0, 0))
            keys.append(torch.cat([torch.arange(*prompt), torch.arange(start, end)]))
        ends = torch.tensor([0, *map(len, keys)]).cumsum(0).tolist()
        return send(torch.cat(keys), self.position_ids.device), tuple(ends)

    @cached_property
    def copies(self) -> tuple[Tensor, list[tuple[int, int, Tensor]]]:
        """Where `gathered` has the tokens: each token's own place, and for each prompt (a, b, [n, b - a] the places of
        its tokens in all copies). In the example: (0 1 4 7 8), [(0, 2, ((0 1), (2 3), (5 6)))]."""
        own, places = [], {(a, b): [] for a, b, _ in self.groups}
        for (start, end), last in zip(pairwise(self.segments), self.gathered[1][1:], strict=True):
            own.append(torch.arange(last - (end - start), last))
            for a, b, c in self.groups:
                if start == a or b <= start < c:
                    first = int(own[-1][0]) - (b - a if start != a else 0)
                    places[a, b].append(torch.arange(first, first + b - a))
        device = self.position_ids.device
        return send(torch.cat(own), device), [(*ends, send(torch.stack(x), device)) for ends, x in places.items()]

    @cached_property
    def variable_length(self) -> PackedSeqParams:
        """The parameters of that call."""
        return _variable_length(self.segments, self.gathered[1], self.position_ids.device)


def fed_lens(batch: Batch) -> Tensor:
    """Return [B]: the number of response tokens that are fed, all but the last of each segment."""
    return (batch.response_lens - batch.segment_counts).clamp(min=0)


def filler(batch: Batch) -> Batch:
    """Return the shortest sequence without trainable tokens. A rank without work feeds it, so that collectives
    match."""
    shortest = batch.select(batch.lengths.argmin().reshape(1))
    return shortest.with_tokens(**dict.fromkeys(_masks(batch), torch.zeros(len(shortest.response_ids))))


def _masks(batch: Batch) -> set[str]:
    return {name for name in batch.tokens if name.endswith("_mask")} | {"response_mask"}


def zigzag(lengths: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions of concatenated sequences on one context-parallel rank: each sequence is split into 2 cp
    equal chunks, and the rank has chunks `cp_rank` and `2 cp - 1 - cp_rank` (megatron-core's load-balanced layout)."""
    if cp_size == 1:
        return torch.arange(int(lengths.sum()))
    assert not (lengths % (2 * cp_size)).any(), f"{lengths.tolist()} tokens over {cp_size} context-parallel ranks"
    starts, sizes = lengths.cumsum(0) - lengths, lengths // (2 * cp_size)
    own = [starts + index * sizes for index in (cp_rank, 2 * cp_size - 1 - cp_rank)]
    return indices(torch.stack(own, 1).flatten(), sizes.repeat_interleave(2))


def pack(
    batch: Batch,
    layout: PackLayout,
    device: torch.device,
    routes: Sequence[Tensor | None] | None = None,
    images: Images | None = None,
) -> MicroBatch:
    """Build the model's inputs for one micro-batch on this rank. `routes`, if the model has routers: of each sequence
    its [fed tokens, layers, experts per token], or None. `images`: those of the prompts, in packed sequences."""
    inside, places = batch.by_segment()
    groups = inside.prompt_numbers if layout.share_prompts else torch.arange(len(inside))
    cells, padded = _place(inside, groups, layout)
    tokens, positions = cells.fill()
    assert images is not None or (inside.images < 0).all(), "prompts with images, and a model that has none"
    placed = images and images.place(cells, inside.images, tokens, positions)
    lines = 1 if layout.packed else len(inside)
    held = zigzag(padded, layout.cp_size, layout.cp_rank).view(lines, -1)  # [1, T_local] or [b, S_local]
    order = held.T.flatten()  # in the model's order
    place = torch.full((cells.total,), -1)
    place[order] = torch.arange(len(order))
    rows = torch.full((len(batch.response_ids),), -1)  # [R], -1 where another rank predicts, or none
    rows[places] = place[cells.predicting()]
    kept = (rows >= 0).nonzero().flatten()
    ends, ends_on = [0, *padded.cumsum(0).tolist()], torch.device("cpu") if layout.ends_on_host else device
    if not layout.packed:
        packed = None
    elif len(padded) < len(inside):
        packed = _shared_params(cells, send(positions, device), ends_on)
    else:
        packed = _variable_length(ends, ends, ends_on)
    if placed is not None:
        packed = replace(packed, position_ids=send(placed.positions, device), seen=placed.seen(order, device))
    uses = None if routes is None else send(cells.uses()[order], device)
    table = cells.routes(_by_segment(routes, batch, inside)) if routes else None
    table = None if table is None else send(table[order], device)
    return _written(MicroBatch(batch, send(tokens[held], device), packed, send(rows[kept], device), kept, uses, table))


def _by_segment(routes: Sequence[Tensor | None], batch: Batch, inside: Batch) -> Sequence[Tensor | None]:
    """The routes of each sequence of `inside`, the segments of `batch`, whose routes lie end to end."""
    if batch.segment_of is None:
        return routes
    parts = iter((inside.prompt_lens + fed_lens(inside)).tolist())
    lens = [[next(parts) for _ in range(count)] for count in batch.segment_counts.tolist()]
    split = ([None] * len(own) if r is None else r.split(own) for r, own in zip(routes, lens, strict=True))
    return [part for own in split for part in own]


def _written(micro: MicroBatch) -> MicroBatch:
    """Leave out the prompts of later segments, and the response tokens without any mask of 1. A filler has no others,
    and keeps its own: the heads' collectives must match."""
    batch = micro.batch
    predicted = torch.ones(len(batch.response_ids), dtype=torch.bool)
    predicted = predicted if batch.segment_of is None else batch.segment_of >= 0
    seen = torch.stack([batch.tokens.get(name, batch.response_mask) for name in _masks(batch)]).any(0) & predicted
    seen = seen if seen.any() else predicted
    if seen.all():
        return micro
    own = seen[micro.kept].nonzero().flatten()
    numbers = (seen.cumsum(0) - 1)[micro.kept[own]]
    return replace(micro.select(own), batch=batch.with_response_tokens(seen), kept=numbers)


@dataclass(frozen=True)
class _Cells:
    """The cells of a batch's tokens in a flat row of `total` cells."""

    batch: Batch
    groups: Tensor  # [B] sequences with the same number share their prompt
    prompts: Tensor  # [N] first cell of each group's prompt
    prompt_lens: Tensor  # [N]
    responses: Tensor  # [B] first cell of each response's fed tokens
    total: int

    @cached_property
    def first(self) -> Tensor:
        """[N] the first sequence of each group."""
        index = torch.arange(len(self.batch))
        return torch.full_like(self.prompts, len(index)).scatter_reduce(0, self.groups, index, "amin")

    @cached_property
    def fed(self) -> tuple[Tensor, Tensor]:
        """[fed response tokens] the cell and the sequence of each."""
        lens = fed_lens(self.batch)
        return indices(self.responses, lens), segment_ids(lens)

    def fill(self) -> tuple[Tensor, Tensor]:
        """Return [total] token ids and [total] position ids, 0 in padding."""
        batch, lens = self.batch, fed_lens(self.batch)
        tokens, positions = (torch.zeros(self.total, dtype=torch.long) for _ in range(2))
        prompt, (response, _) = indices(self.prompts, self.prompt_lens), self.fed
        tokens[prompt] = take_segments(batch.prompt_ids, batch.prompt_lens, self.first)
        tokens[response] = batch.response_ids[indices(batch.response_lens.cumsum(0) - batch.response_lens, lens)]
        positions[prompt] = offsets(self.prompt_lens)
        positions[response] = indices(batch.prompt_lens, lens)
        return tokens, positions

    def of(self, number: int) -> Tensor:
        """[n] the cells of a sequence: its prompt's, then its fed response tokens'."""
        starts = torch.stack([self.prompts[self.groups[number]], self.responses[number]])
        return indices(starts, torch.stack([self.batch.prompt_lens[number], fed_lens(self.batch)[number]]))

    def uses(self) -> Tensor:
        """Return [total]: the sequences that have each token, more than one in a shared prompt, 0 in padding."""
        uses = torch.zeros(self.total, dtype=torch.long)
        uses[indices(self.prompts, self.prompt_lens)] = self.groups.bincount().repeat_interleave(self.prompt_lens)
        uses[self.fed[0]] = 1
        return uses

    def routes(self, given: Sequence[Tensor | None]) -> Tensor | None:
        """Return [total, layers, experts per token], -1 in padding and where a sequence has none. A shared prompt has
        those of its first response. None: no sequence has any."""
        present = [(number, routes) for number, routes in enumerate(given) if routes is not None]
        if not present:
            return None
        table = present[0][1].new_full((self.total, *present[0][1].shape[1:]), -1)
        starts, prompts = self.responses.tolist(), self.prompts[self.groups].tolist()
        for number, routes in reversed(present):
            prompt = int(self.batch.prompt_lens[number])
            table[prompts[number] : prompts[number] + prompt] = routes[:prompt]
            table[starts[number] : starts[number] + len(routes) - prompt] = routes[prompt:]
        return table

    def predicting(self) -> Tensor:
        """Return [R]: the cell whose hidden state predicts each response token: the cell of the token before it."""
        lens = self.batch.response_lens
        ends = (self.prompts[self.groups] + self.batch.prompt_lens - 1)[self.batch.sequence_ids]
        return torch.where(offsets(lens) == 0, ends, indices(self.responses - 1, lens))


def _padded_lengths(lengths: Tensor, layout: PackLayout) -> Tensor:
    each = 2 * layout.cp_size if layout.cp_size > 1 else 1
    whole = math.lcm(each, layout.cp_size * layout.total_multiple)
    if not layout.packed:
        return torch.full_like(lengths, -(-int(lengths.max()) // whole) * whole)
    padded = (lengths + each - 1) // each * each
    padded[-1] += -int(padded.sum()) % whole
    return padded


def _place(batch: Batch, groups: Tensor, layout: PackLayout) -> tuple[_Cells, Tensor]:
    """Place each group's prompt and, after it, its responses. Returns the cells and the padded lengths of the
    groups."""
    count, lens = int(groups.max()) + 1, fed_lens(batch)
    prompt_lens = torch.zeros(count, dtype=torch.long).scatter_reduce(0, groups, batch.prompt_lens, "amax")
    lengths = prompt_lens.index_add(0, groups, lens)
    padded = _padded_lengths(lengths, layout)
    starts = padded.cumsum(0) - padded
    order = groups.argsort(stable=True)
    before = lens[order].cumsum(0) - lens[order]  # response tokens before, including those of earlier groups
    earlier = (lengths - prompt_lens).cumsum(0) - (lengths - prompt_lens)
    responses = torch.empty_like(lens)
    responses[order] = before + (starts + prompt_lens - earlier)[groups[order]]
    return _Cells(batch, groups, starts, prompt_lens, responses, int(padded.sum())), padded


def _variable_length(queries: Sequence[int], keys: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Return the parameters of concatenated sequences from the ends of their queries and keys, which begin with 0."""
    ends_q, ends_kv = (send(torch.tensor(ends, dtype=torch.int32), device) for ends in (queries, keys))
    return Packed(
        qkv_format="thd",
        cu_seqlens_q=ends_q,
        cu_seqlens_kv=ends_kv,
        cu_seqlens_q_padded=ends_q,
        cu_seqlens_kv_padded=ends_kv,
        max_seqlen_q=max(b - a for a, b in pairwise(queries)),
        max_seqlen_kv=max(b - a for a, b in pairwise(keys)),
    )


def _shared_params(cells: _Cells, position_ids: Tensor, ends_on: torch.device) -> SharedPrompts:
    """`position_ids` [T] are on the device; `ends_on` is where the ends of sequences go."""
    batch, groups = cells.batch, cells.groups
    shared = groups.bincount() > 1
    ends_of_prompts = cells.prompts + cells.prompt_lens
    ends = torch.cat([cells.prompts[1:], torch.tensor([cells.total])])
    cuts = [cells.prompts, cells.responses[shared[groups]], torch.tensor([cells.total])]
    spans = torch.stack([cells.prompts, ends_of_prompts, ends], 1)[shared & (ends_of_prompts < ends)]
    whole = vars(_variable_length([0, cells.total], [0, cells.total], ends_on))
    longest = int((batch.prompt_lens + fed_lens(batch)).max())
    return SharedPrompts(
        **whole | {"max_seqlen_q": longest, "max_seqlen_kv": longest, "position_ids": position_ids},
        segments=tuple(torch.cat(cuts).unique().tolist()),
        groups=tuple(map(tuple, spans.tolist())),
    )
