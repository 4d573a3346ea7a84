"""Loads HF-named tensors into a model and streams them out, in any tensor, pipeline, virtual pipeline and expert
layout.

`WeightStream` is the exact inverse of `load`. Both need memory for a parameter at a time, or `JOINED` bytes. A *lookup*
is any function from an HF name to its tensor: an `HFFolder`, `random_tensors`, or a dict's `__getitem__`.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor
from megatron.core.models.gpt import GPTModel
from safetensors import SafetensorError
from torch import Tensor

from megatron_rft.config.lora import Lora
from megatron_rft.conversion import FolderWriter, Mapping, hf_shapes, lora, partition_dim, shard, unshard
from megatron_rft.conversion.folder import keep_one
from megatron_rft.conversion.mapping import ADAPTER, LAYER, expert_of
from megatron_rft.families.tables import EXPERT_BIAS
from megatron_rft.megatron import parallel, seams
from megatron_rft.megatron.model import ValueHead
from megatron_rft.utils.errors import RunFailed, disk_is_full

Lookup = Callable[[str], Tensor]
JOINED = 4 << 20  # bytes of a batch of a stream
STACKS = 4  # tensors of a layer's stacked experts
GROUPED = re.compile(r"(.+\.mlp\.experts\.)(\w+\.(?:weight|bias))(\d+)")  # Transformer Engine's experts
LOCAL = r"\1local_experts.\3.\2"
ZERO = ("bias", "sinks")  # ends of the names of tensors that are initially zero


def load(chunks: list[GPTModel], lookup: Lookup, mapping: Mapping, adapters: bool = False) -> None:
    """Load every tensor of this rank, without adapters or, with `adapters`, those alone. A value head stays
    unchanged if the lookup has none (KeyError).

    Afterwards call `reload_model_params` of an optimizer that has main parameters.
    """
    kept = lru_cache(maxsize=STACKS)(lookup)  # the experts of a layer may be slices of the same tensors
    with torch.no_grad():
        for name, parameter in named_tensors(chunks, adapters):
            find = lookup if mapping.stacked_expert(name) is None else kept
            try:
                whole = mapping.merge(name, [find(n) for n in mapping.hf_names(name)])
            except KeyError:
                if name != "value_head.weight":
                    raise
                continue
            part = shard(name, whole, *_sharding(name))
            assert part.shape == parameter.shape, f"{name}: {tuple(part.shape)} for {tuple(parameter.shape)}"
            parameter.copy_(part)


class Outgoing(NamedTuple):
    """A parameter as a stream gathers it: in a batch, which has the same first four."""

    stage: int  # pipeline rank
    dtype: torch.dtype
    shard_group: dist.ProcessGroup  # of the ranks with its shards
    expert_group: dist.ProcessGroup | None  # of the expert-parallel ranks, if it is an expert's
    name: str
    shape: torch.Size  # of a rank's shard
    shards: int | None  # that are joined: 1 if every rank of `shard_group` has it whole, None if all have a part
    # The whole parameter and, if it is an expert's, those of the other expert-parallel ranks: its name, its HF tensors'
    # names, and the number of an expert that is a slice of them.
    wholes: list[tuple[str, list[str], int | None]]


class WeightStream:
    """Yields (HF name, unsharded tensor) of the model on every rank, in a fixed order, without a tied output matrix.

    The change of a layer's adapter is added to its weight in fp32, and the sum rounded once, to `dtype` if that is
    wider than the weight's: a change can be as small as the rounding of the weight.
    `adapters`: yield the adapters instead. Collective, also the constructor, which finds out what is where: every rank
    must exhaust the stream. A tensor may share the model's memory: copy it to keep it after an update.
    """

    def __init__(
        self, chunks: list[GPTModel], mapping: Mapping, adapters: bool = False, dtype: torch.dtype | None = None
    ):
        self.mapping, self.mine = mapping, dict(named_tensors(chunks, adapters))
        self.batches = _joined(_list_parts(self.mine, mapping, dtype))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        mapping, stacks = self.mapping, {}  # of stacked experts: HF name -> slices that have been gathered
        for batch in self.batches:
            sizes = [part.shape.numel() for part in batch]
            ranks = [[flat.split(sizes) for flat in shards] for shards in self._gathered(batch, sum(sizes))]
            for i, part in enumerate(batch):
                for (name, hf_names, expert), shards in zip(part.wholes, ranks, strict=True):
                    whole = unshard(name, [s[i].view(part.shape) for s in shards[: part.shards]], mapping.vocab_size)
                    named = zip(hf_names, mapping.split(name, whole), strict=True)
                    yield from named if expert is None else _stacked(stacks, expert, named, mapping.experts)

    def _gathered(self, batch: list[Outgoing], size: int) -> Iterable[Sequence[Tensor]]:
        """Return the shards of a batch, each [size], of this expert-parallel rank or, if they are experts', of all."""
        stage, dtype, shard_group, expert_group = batch[0][:4]
        if stage == parallel.pp_rank():
            flats = [_plain(self.mine[part.name]).to(dtype).reshape(-1) for part in batch]
            flat = torch.cat(flats) if len(flats) > 1 else flats[0]
        else:
            flat = torch.empty(size, dtype=dtype, device=parallel.device())
        if parallel.pp_size() > 1:
            dist.broadcast(flat, group=parallel.pp_group(), group_src=stage)
        return zip(*(_all_gather(shard, expert_group) for shard in _all_gather(flat, shard_group)), strict=True)


def _stacked(
    stacks: dict[str, dict[int, Tensor]], expert: int, named: Iterable[tuple[str, Tensor]], count: int
) -> Iterator[tuple[str, Tensor]]:
    """Add the slices of an expert, and yield the tensors that now have all `count`."""
    for name, piece in named:
        slices = stacks.setdefault(name, {})
        slices[expert] = piece.clone()
        if len(slices) == count:
            yield name, torch.stack([slices[i] for i in range(count)])
            del stacks[name]


def named_tensors(chunks: list[GPTModel], adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's parameters and buffers that belong to the model, or the parameters of adapters, by canonical
    name: layers and experts are numbered over the whole model."""
    for model in chunks:
        local_experts = (model.config.num_moe_experts or 0) // model.config.expert_model_parallel_size
        for name, parameter in own_tensors(model):
            if bool(ADAPTER.fullmatch(name)) != adapters:
                continue
            name = GROUPED.sub(LOCAL, name)
            if in_layer := LAYER.fullmatch(name):
                layer = model.decoder.layers[int(in_layer[1])].layer_number - 1
                name = _renumbered(name, layer, parallel.ep_rank() * local_experts)
            elif name == "output_layer.weight" and isinstance(model.output_layer, ValueHead):
                name = "value_head.weight"
            yield name, parameter


def own_tensors(model: GPTModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a chunk, and its buffers that belong to the model."""
    yield from model.named_parameters()
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(tuple(EXPERT_BIAS)))


def _renumbered(name: str, layer: int | str, offset: int) -> str:
    """Return the name of the same part of layer number `layer`, its expert's number (if any) increased by `offset`."""
    _, expert, part = LAYER.fullmatch(name).groups()
    return f"decoder.layers.{layer}." + (f"mlp.experts.local_experts.{int(expert) + offset}." if expert else "") + part


def _sharding(name: str) -> tuple[int, int]:
    """Return (number of shards, this rank's shard) of a parameter."""
    if expert_of(name) is not None:
        return parallel.etp_size(), parallel.etp_rank()
    return parallel.tp_size(), parallel.tp_rank()


def _plain(parameter: Tensor) -> Tensor:
    """The values of a parameter, with the change of its adapter."""
    values = dequantize_fp8_tensor(parameter) if is_float8tensor(parameter) else parameter.detach()
    adapter = getattr(parameter, "adapter", None)
    return values if adapter is None else (values.float() + adapter.change().detach())


def _list_parts(mine: dict[str, Tensor], mapping: Mapping, merged: torch.dtype | None) -> list[Outgoing]:
    """Return every parameter of this rank's pipeline, stage by stage. `merged`: the least dtype of weights with an
    adapter."""
    stages: list[Any] = [None] * parallel.pp_size()
    wide = {name: torch.promote_types(p.dtype, merged) for name, p in mine.items() if merged and hasattr(p, "adapter")}
    own = [(name, p.shape, wide.get(name, p.dtype)) for name, p in mine.items()]
    dist.all_gather_object(stages, own, group=parallel.pp_group())
    skipped = {"output_layer.weight"} if mapping.tied else set()  # a tied copy on the last stage
    parts = [(stage, *entry) for stage, entries in enumerate(stages) for entry in entries if entry[0] not in skipped]
    return [_outgoing(mapping, *part) for part in parts]


def _outgoing(mapping: Mapping, stage: int, name: str, shape: torch.Size, dtype: torch.dtype) -> Outgoing:
    what = name, shape, 1 if partition_dim(name) is None else None
    if expert_of(name) is None:
        wholes = [(name, mapping.hf_names(name), None)]
        return Outgoing(stage, dtype, parallel.tp_group(), None, *what, wholes)
    layer, step = LAYER.fullmatch(name)[1], mapping.experts // parallel.ep_size()
    names = [_renumbered(name, layer, (rank - parallel.ep_rank()) * step) for rank in range(parallel.ep_size())]
    wholes = [(each, mapping.hf_names(each), mapping.stacked_expert(each)) for each in names]
    return Outgoing(stage, dtype, parallel.etp_group(), parallel.ep_group(), *what, wholes)


def _joined(parts: list[Outgoing]) -> list[list[Outgoing]]:
    """Return the parameters in batches of up to `JOINED` bytes, whose ranks are the same: the time of a small one's
    collective calls is that of the calls. A single rank makes none, and joins none."""
    batches, room = [], 0
    for part in parts:
        size = part.shape.numel() * part.dtype.itemsize
        if size > room or part[:4] != batches[-1][0][:4]:
            batches.append([])
            room = JOINED if dist.get_world_size() > 1 else 0
        batches[-1].append(part)
        room -= size
    return batches


def _all_gather(part: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    if group is None or group.size() == 1:
        return [part]
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part, group=group)
    return parts


def random_tensors(hf_config: Any, seed: int) -> Lookup:
    """Return a lookup of random weights by HF's conventions. Each depends on (seed, name), not on the layout.

    Matrices and embeddings are normal(0, initializer_range), norms one, biases zero.
    """
    shapes = hf_shapes(hf_config)

    def lookup(name: str) -> Tensor:
        shape = shapes[name]
        if name.endswith(ZERO):
            return torch.zeros(shape)
        if len(shape) == 1:
            return torch.ones(shape)
        return torch.randn(shape, generator=_generator(seed, name)) * hf_config.initializer_range

    return seams.now.new_tensors(lookup, shapes)


def new_adapters(hf_config: Any, options: Lora, seed: int) -> Lookup:
    """Return a lookup of new adapters as PEFT makes them: A uniform within 1 / sqrt(in) (Kaiming with a = sqrt(5)), B
    zero. Each depends on (seed, name), not on the layout."""
    shapes = lora.shapes(hf_config, options)

    def lookup(name: str) -> Tensor:
        if name.endswith(".lora_B.weight"):
            return torch.zeros(shapes[name])
        bound = shapes[name][1] ** -0.5
        return torch.empty(shapes[name]).uniform_(-bound, bound, generator=_generator(seed, name))

    return seams.now.new_tensors(lookup, shapes)


def _generator(seed: int, name: str) -> torch.Generator:
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)


def open_folder(path: str | Path, hf_config: Any) -> Lookup:
    """Open an HF folder as a lookup, and check it against the configuration."""
    return seams.now.open_folder(path, hf_config)


def save_folder(
    tensors: Iterable[tuple[str, Tensor]],
    path: str | Path,
    hf_config: Any,
    tokenizer_folder: str | Path | None = None,
    beside: dict[str, str] | None = None,
) -> None:
    """Write a `WeightStream` to an HF folder that transformers can load, and the texts `beside` it by file name. Rank 0
    writes; all ranks return together.

    Raises:
        RunFailed: the disk is full, on every rank. The new folder is removed; an older one stays.
    """
    tensors, full = iter(tensors), [False]
    if parallel.rank() == 0:
        writer = FolderWriter(path)
        try:
            for name, tensor in tensors:
                writer.add(name, tensor)
            for name, text in (beside or {}).items():
                (writer.partial / name).write_text(text)
            writer.finish(hf_config, tokenizer_folder)
        except (OSError, SafetensorError) as error:
            if not disk_is_full(error):
                raise
            keep_one(writer.path)
            full = [True]
    for _ in tensors:  # the stream is collective: also rank 0 reads it to the end, if the disk is full
        pass
    dist.broadcast_object_list(full, group=parallel.host_group("checkpoint"))  # rank 0 may write for an hour
    if full[0]:
        raise RunFailed(
            f"the disk is full: the model did not fit into {path}. The checkpoints are unchanged: free some space and "
            "run the same command again"
        )
