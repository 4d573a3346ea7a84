"""From a ragged batch to what the model eats: micro-batches by token budget, balanced over ranks, packed or padded.

Layout of a micro-batch with sequences (x x y y) and (x y y y), x prompt and y response. The last token of a sequence
predicts nothing and is not fed. `rows` names, for each response token, the position whose hidden state predicts it:

    packed     tokens x x y x y y        [1, T]    rows 1 2 3 4 5
    padded     tokens x x y / x y y      [b, S]    rows (row-major over [S, b]) 2 4 1 3 5

Knows no process group: the layout (context-parallel rank and size, padding multiples) is given.
"""

import heapq
import math
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_rft.records import Batch, segment_ids, take_segments


@dataclass(frozen=True)
class Layout:
    """What a micro-batch must fit: each sequence a multiple of 2 cp (zigzag context parallelism), the whole a multiple
    of `total_multiple` per context-parallel rank (sequence parallelism, FP8)."""

    cp_size: int = 1
    cp_rank: int = 0
    total_multiple: int = 1
    packed: bool = True

    @property
    def sequence_multiple(self) -> int:
        return 2 * self.cp_size if self.cp_size > 1 else 1


@dataclass(frozen=True)
class MicroBatch:
    """`rows` [R_local] are positions in this rank's flattened hidden states, `kept` [R_local] the response tokens (of
    the micro-batch's R) that they predict: all of them, unless context parallelism spreads them over ranks."""

    batch: Batch
    token_ids: Tensor  # [1, T_local] or [b, S_local]
    position_ids: Tensor  # likewise
    packed: PackedSeqParams | None
    rows: Tensor  # [R_local]
    kept: Tensor  # [R_local]

    @property
    def targets(self) -> Tensor:
        """[R_local] the token ids whose log-probs are wanted."""
        return self.batch.response_ids.to(self.token_ids.device)[self.kept]


def plan(batch: Batch, dp_size: int, token_budget: int, count_multiple: int = 1) -> list[list[Tensor]]:
    """Which sequences go into which micro-batch of which data-parallel rank: [dp][micro-batch] -> positions in `batch`.

    Every rank gets the same number of micro-batches (pipeline and expert parallelism need that), a multiple of
    `count_multiple`, as few as the token budget allows, with about equal token counts. Units are not torn. The plan
    is a pure function of the batch, so all ranks compute the same one. A micro-batch may be empty.
    """
    _, unit = batch.units.unique(return_inverse=True)
    cost = torch.zeros(int(unit.max()) + 1 if len(unit) else 0, dtype=torch.long)
    cost.index_add_(0, unit, batch.lengths - 1)
    per_rank = max(1, math.ceil(int(cost.sum()) / (token_budget * dp_size)))
    per_rank = math.ceil(per_rank / count_multiple) * count_multiple
    while True:
        bins = _balanced(cost.tolist(), dp_size * per_rank)
        heaviest = max((sum(int(cost[u]) for u in units) for units in bins), default=0)
        if heaviest <= token_budget or per_rank >= len(cost):
            break
        per_rank += count_multiple
    members = [torch.isin(unit, torch.tensor(units, dtype=torch.long)).nonzero().flatten() for units in bins]
    return [members[rank::dp_size] for rank in range(dp_size)]


def plan_within(batch: Batch, members: list[Tensor], token_budget: int, count_multiple: int = 1) -> list[list[Tensor]]:
    """`plan` where the sequences of each data-parallel rank are given: `members` and what is returned are positions in
    `batch`."""
    cuts = [plan(batch.select(mine), 1, token_budget, count_multiple)[0] for mine in members]
    longest, nothing = max(len(cut) for cut in cuts), torch.zeros(0, dtype=torch.long)
    return [
        [mine[index] for index in cut] + [nothing] * (longest - len(cut))
        for mine, cut in zip(members, cuts, strict=True)
    ]


def _balanced(cost: list[int], bins: int) -> list[list[int]]:
    """Longest first onto the lightest bin; bins come back heaviest first, so that a stride over them is balanced."""
    heap = [(0, index) for index in range(bins)]
    content: list[list[int]] = [[] for _ in range(bins)]
    for unit in sorted(range(len(cost)), key=lambda u: (-cost[u], u)):
        load, index = heapq.heappop(heap)
        content[index].append(unit)
        heapq.heappush(heap, (load + cost[unit], index))
    weight = {index: load for load, index in heap}
    return [content[index] for index in sorted(range(bins), key=lambda i: (-weight[i], i))]


def filler(batch: Batch) -> Batch:
    """The shortest sequence with no trainable token: what a rank without work forwards, so that collectives match."""
    shortest = batch.select(batch.lengths.argmin().reshape(1))
    masks = {name for name in batch.tokens if name.endswith("_mask")} | {"response_mask"}
    return shortest.with_tokens(**dict.fromkeys(masks, torch.zeros(len(shortest.response_ids))))


def _fed(batch: Batch) -> tuple[Tensor, Tensor]:
    """The token ids that are fed, sequences end to end, and their lengths [B]."""
    both = torch.cat([batch.prompt_ids, batch.response_ids])
    lens = torch.stack([batch.prompt_lens, batch.response_lens]).flatten()  # prompts first, then responses
    count = len(batch)
    interleaved = torch.stack([torch.arange(count), torch.arange(count) + count], 1).flatten()
    tokens = take_segments(both, lens, interleaved)
    lengths = batch.lengths
    last = torch.zeros(len(tokens), dtype=torch.bool)
    last[lengths.cumsum(0) - 1] = True
    return tokens[~last], lengths - 1


def _padded_lengths(lengths: Tensor, layout: Layout) -> Tensor:
    each = layout.sequence_multiple
    padded = (lengths + each - 1) // each * each
    whole = math.lcm(each, layout.cp_size * layout.total_multiple)
    padded[-1] += -int(padded.sum()) % whole
    return padded


def zigzag(lengths: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """The positions of end-to-end sequences that one context-parallel rank holds: of each sequence cut into 2 cp equal
    chunks, chunk `cp_rank` and chunk `2 cp - 1 - cp_rank` (megatron-core's load-balanced layout)."""
    if cp_size == 1:
        return torch.arange(int(lengths.sum()))
    assert not (lengths % (2 * cp_size)).any(), f"{lengths.tolist()} tokens over {cp_size} context-parallel ranks"
    parts = []
    for start, length in zip((lengths.cumsum(0) - lengths).tolist(), lengths.tolist(), strict=True):
        chunk = length // (2 * cp_size)
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            parts.append(torch.arange(start + index * chunk, start + (index + 1) * chunk))
    return torch.cat(parts)


def pack(batch: Batch, layout: Layout, device: torch.device) -> MicroBatch:
    """One micro-batch as the model's inputs on this rank."""
    return _pack(batch, layout, device) if layout.packed else _pad(batch, layout, device)


def _predicting(batch: Batch, starts: Tensor, stride: int = 1) -> Tensor:
    """[R] the flat position whose hidden state predicts each response token; sequence i begins at starts[i]."""
    offsets = (
        torch.arange(len(batch.response_ids))
        - (batch.response_lens.cumsum(0) - batch.response_lens)[batch.sequence_ids]
    )
    return starts[batch.sequence_ids] + (batch.prompt_lens[batch.sequence_ids] - 1 + offsets) * stride


def _local(rows: Tensor, held: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Global rows -> (positions on this rank, which of the rows those are)."""
    where = torch.full((total,), -1)
    where[held] = torch.arange(len(held))
    local = where[rows]
    kept = (local >= 0).nonzero().flatten()
    return local[kept], kept


def _pack(batch: Batch, layout: Layout, device: torch.device) -> MicroBatch:
    fed, lengths = _fed(batch)
    padded = _padded_lengths(lengths, layout)
    starts = padded.cumsum(0) - padded
    position_ids = torch.arange(int(padded.sum())) - starts[segment_ids(padded)]
    token_ids = torch.zeros(int(padded.sum()), dtype=torch.long)
    token_ids[position_ids < lengths[segment_ids(padded)]] = fed
    held = zigzag(padded, layout.cp_size, layout.cp_rank)
    rows, kept = _local(_predicting(batch, starts), held, len(token_ids))
    ends = torch.cat([torch.zeros(1, dtype=torch.long), padded.cumsum(0)]).to(device, torch.int32)
    longest = int(padded.max())
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    inputs = [x[held][None].to(device) for x in (token_ids, position_ids)]
    return MicroBatch(batch, *inputs, packed, rows.to(device), kept.to(device))


def _pad(batch: Batch, layout: Layout, device: torch.device) -> MicroBatch:
    fed, lengths = _fed(batch)
    whole = math.lcm(layout.sequence_multiple, layout.cp_size * layout.total_multiple)
    width, count = -int(-lengths.max() // whole) * whole, len(batch)
    token_ids = torch.zeros(count, width, dtype=torch.long)
    token_ids[torch.arange(width) < lengths[:, None]] = fed
    held = zigzag(torch.tensor([width]), layout.cp_size, layout.cp_rank)
    rows = _predicting(batch, torch.arange(count), stride=count)  # positions of [S, b], as the model holds them
    held_rows = (held[:, None] * count + torch.arange(count)).flatten()
    rows, kept = _local(rows, held_rows, width * count)
    position_ids = held.expand(count, -1).contiguous().to(device)
    return MicroBatch(
        batch, token_ids[:, held].contiguous().to(device), position_ids, None, rows.to(device), kept.to(device)
    )
