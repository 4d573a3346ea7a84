"""The optimizer's state in a checkpoint, written by each rank for itself: nothing is gathered.

megatron-core's format that any layout can read gathers a pipeline stage's state on its first data-parallel ranks: 12
bytes a parameter through gloo, 384 GB for 32B parameters. Here a rank writes the ranges of the flattened parameters
that it owns:

    optimizer_00017.safetensors       named i/param, i/exp_avg, i/exp_avg_sq: range i of this rank
    its metadata                      for each i: the set of moments, the whole tensor's key, the box that the rank's
                                      shard is in it (offset, shape), and the range of the flattened box

A run in another layout finds the ranges that overlap its own. In the same tensor- and pipeline-parallel layout it reads
these alone; in another it also reads the rest of each box that it cuts.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rft.conversion.mapping import VOCABULARY
from megatron_rft.utils.errors import DataError

NAMES = ("param", "exp_avg", "exp_avg_sq")
RANGES = "ranges"  # key of the files' metadata


@dataclass(frozen=True)
class Range:
    """Elements start to stop of the flattened box at `offset` in the tensor `key`."""

    key: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int
    stop: int


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"optimizer_{rank:05d}.safetensors"


def parts(optimizer: Any) -> list:
    """Return megatron-core's distributed optimizers. One of a rank without parameters of its kind has no ranges."""
    return [part for part in optimizer.chained_optimizers if hasattr(part, "gbuf_ranges")]


def gather_nothing(optimizer: Any) -> None:
    """Let megatron-core's checkpoint of the optimizer leave out fp32 weights and moments."""
    for part in parts(optimizer):
        part.sharded_param_state_fully_reshardable = lambda *_, **__: {}
        part.load_parameter_state_from_fully_reshardable = lambda _: None


def owned(part: Any, chunks: dict[str, Any]) -> Iterator[tuple[Tensor, int, int, list[tuple[Range, int, bool]]]]:
    """Yield (parameter, start, stop) of each owned range of a flattened parameter, and its ranges of tensors of the
    checkpoint: (range, its first element in the parameter, whether this rank writes it)."""
    sharded, _ = extract_sharded_tensors_and_factories(chunks)
    of_parameter = {each.data: each for each in nested_values(sharded)}
    for buffer in part.gbuf_ranges:
        for bucket in (bucket for buckets in buffer.values() for bucket in buckets):
            for parameter, ranges in bucket["param_map"].items():
                start, stop = ranges["param"].start, ranges["param"].end
                yield parameter, start, stop, list(_cut(parameter, of_parameter[parameter], start, stop))


def _cut(parameter: Tensor, sharded: Any, start: int, stop: int) -> Iterator[tuple[Range, int, bool]]:
    shards = [sharded] if isinstance(sharded, ShardedTensor) else nested_values({"parts": sharded.build()})
    for shard in shards:
        first = shard.data.storage_offset() - parameter.storage_offset()
        assert shard.data.is_contiguous(), f"{shard.key} is not a range of its flattened parameter"
        low, high = max(start, first), min(stop, first + shard.data.numel())
        if low < high:
            box = (1,) * shard.prepend_axis_num + tuple(shard.data.shape)
            found = Range(shard.key, tuple(shard.global_offset), box, low - first, high - first)
            yield found, low, not any(shard.replica_id[:-1])


class Shards:
    """The ranges that this rank writes, and copies of their values on the host."""

    def __init__(self) -> None:
        self.ranges: list[dict] = []
        self.values: list[dict[str, Tensor]] = []

    def add(self, name: str, optimizer: Any, chunks: dict[str, Any]) -> None:
        """Add the set of moments `name`."""
        for part in parts(optimizer):
            for parameter, start, _, cut in owned(part, chunks):
                state = part._get_main_param_and_optimizer_states(parameter)
                for found, low, writes in cut:
                    if writes:
                        span = slice(low - start, low - start + found.stop - found.start)
                        self.ranges.append({"set": name} | asdict(found))
                        flat = {k: state[k].detach().view(-1)[span] for k in NAMES}
                        self.values.append({k: value.float().to("cpu", copy=True) for k, value in flat.items()})

    def write(self, path: Path) -> None:
        tensors = {f"{i}/{name}": value for i, each in enumerate(self.values) for name, value in each.items()}
        new = path.with_suffix(".new")
        save_file(tensors, new, {RANGES: json.dumps(self.ranges)})
        new.replace(path)


def index(folder: Path) -> list[tuple[str, int, dict]]:
    """Return (file, number, range) of all ranges in a checkpoint."""
    ranges = []
    for path in sorted(folder.glob("optimizer_*.safetensors")):
        with safe_open(path, "pt") as file:
            ranges += [(str(path), i, each) for i, each in enumerate(json.loads(file.metadata()[RANGES]))]
    return ranges


class ShardReader:
    """Reads ranges from the files of `index`."""

    def __init__(self, found: list[tuple[str, int, dict]]):
        # set and key -> box -> (file, number, start, stop) of each range
        self.known: dict[tuple[str, str], dict[tuple, list]] = defaultdict(lambda: defaultdict(list))
        for path, number, one in found:
            box = tuple(one["offset"]), tuple(one["shape"])
            self.known[one["set"], one["key"]][box].append((path, number, one["start"], one["stop"]))
        for (_, key), boxes in self.known.items():
            if any(sum(stop - start for *_, start, stop in each) < math.prod(box[1]) for box, each in boxes.items()):
                raise DataError(f"a part of the optimizer's state of {key} is missing")
        self.open = cache(lambda path: safe_open(path, "pt"))

    @torch.no_grad()
    def load(self, name: str, optimizer: Any, chunks: dict[str, Any]) -> None:
        """Fill the optimizer's fp32 weights and moments with the set `name`. Raises DataError if some are missing."""
        for part in parts(optimizer):
            for parameter, start, stop, cut in owned(part, chunks):
                tensors = {each: torch.zeros(stop - start) for each in NAMES}
                for wanted, low, _ in cut:
                    for each, whole in tensors.items():
                        self._fill(whole[low - start :][: wanted.stop - wanted.start], name, each, wanted)
                device = part._get_main_param_and_optimizer_states(parameter)["param"].device
                part._set_main_param_and_optimizer_states(parameter, {k: v.to(device) for k, v in tensors.items()})

    def _fill(self, out: Tensor, name: str, value: str, wanted: Range) -> None:
        boxes, own = self.known[name, wanted.key], (wanted.offset, wanted.shape)
        for path, number, start, stop in boxes.get(own, ()):
            low, high = max(start, wanted.start), min(stop, wanted.stop)
            if low < high:
                values = self.open(path).get_slice(f"{number}/{value}")[low - start : high - start]
                out[low - wanted.start : high - wanted.start] = values
        if own not in boxes:
            whole, left = torch.zeros(wanted.shape), math.prod(wanted.shape)
            for box, ranges in boxes.items():
                left -= _paste(whole, wanted.offset, partial(self._box, value, box[1], ranges), *box)
            if left and not (boxes and wanted.key.endswith(VOCABULARY)):  # whose padding depends on the layout
                raise DataError(f"the optimizer's state of {wanted.key} is missing, or a part of it")
            out.copy_(whole.view(-1)[wanted.start : wanted.stop])

    def _box(self, value: str, shape: tuple, ranges: list) -> Tensor:
        flat = torch.zeros(math.prod(shape))
        for path, number, start, stop in ranges:
            flat[start:stop] = self.open(path).get_tensor(f"{number}/{value}")
        return flat.view(shape)


def _paste(whole: Tensor, at: tuple, read: Any, offset: tuple, shape: tuple) -> int:
    """Copy the part of the box at `offset` that lies in `whole`, which is at `at`. Returns its number of elements."""
    low = [max(a, b) for a, b in zip(at, offset, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in zip(at, whole.shape, offset, shape, strict=True)]
    if count := math.prod(max(b - a, 0) for a, b in zip(low, high, strict=True)):
        into = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, at, strict=True))
        out_of = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))
        whole[into] = read()[out_of]
    return count
