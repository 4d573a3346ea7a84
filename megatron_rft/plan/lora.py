"""Counts the adapters of a recipe, and checks that the model can have them. No torch."""

from collections.abc import Iterator

from megatron_rft.config.lora import LAYERS, Lora
from megatron_rft.families.shapes import Part, partition_dim
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.parameters import Parameter, stage_layers, total
from megatron_rft.utils.errors import ConfigError


def check(options: Lora, s: ModelShape) -> str:
    """Return the plan's line about the adapters. Raises ConfigError if the model cannot have them."""
    _check_model(options, s)
    number = count(options, s)
    size = f"{number / 1e6:.2f} M" if number >= 1e5 else str(number)
    scale = "alpha / sqrt(rank)" if options.use_rslora else "alpha / rank"
    return (
        f"lora: adapters of rank {options.rank} on {' and '.join(options.targets)}, times {scale} = {options.scale:g}: "
        f"{size} parameters are trained, {number / s.whole():.2%} of the model"
    )


def _check_model(options: Lora, s: ModelShape) -> None:
    if any(s.mixture) and "mlp" in options.targets:
        raise ConfigError(
            "lora.targets: adapters of experts are not supported, because megatron-core multiplies all experts of a "
            "rank in one grouped product: set it to [attention]"
        )
    tower = s.tower.linear if s.tower and "vision" in options.targets else {}
    if not tower and "vision" in options.targets:
        raise ConfigError("lora.targets: vision matches nothing, this model has no vision tower")
    every = {part.name: part for layer in s.parts for part in layer}
    for target in options.targets:
        if missing := [name for name in LAYERS[target] if f"{name}.weight" not in every]:
            raise ConfigError(f"lora.targets: {target} matches nothing, the layers of this model have no {missing[0]}")
    sizes = [(min(shape), name) for name, shape in tower.items()] + [
        (size, hf_name)
        for part in adapted(tuple(every.values()), options)
        for hf_name in part.hf_names
        for size in (part.shape[0] // len(part.hf_names) if len(part.hf_names) < 3 else s.kv, part.shape[1])
    ]
    smallest, name = min(sizes)
    if options.rank > smallest:
        name = name.removesuffix(".weight").rpartition(".")[2]
        raise ConfigError(
            f"lora.rank: {options.rank} is above the smallest dimension of an adapted matrix, {smallest} of {name}: a "
            "larger rank adds nothing"
        )


def adapted(layer: tuple[Part, ...], options: Lora) -> Iterator[Part]:
    names = {f"{name}.weight" for target in options.targets for name in LAYERS[target]}
    return (part for part in layer if part.name in names)


def adapter_chunks(
    s: ModelShape, options: Lora, layout: Layout, stage: int, value_head: bool = False
) -> list[list[Parameter]]:
    """Return the trained parameters of a rank of a pipeline stage, as `parameters.stage_chunks` does for all."""
    stages = stage_layers(s, layout, stage)
    chunks = [[each for parts in layers for each in _layer(parts, options, layout.tp)] for _, layers in stages]
    if value_head and stage == layout.pp - 1:
        chunks[-1].append(Parameter(s.hidden))
    if s.tower and stage == 0 and "vision" in options.targets:
        chunks[0] += [Parameter(size * options.rank) for shape in s.tower.linear.values() for size in shape[::-1]]
    return chunks


def _layer(parts: tuple[Part, ...], options: Lora, tp: int) -> Iterator[Parameter]:
    """a and b of each weight, in the model's order: they are cut as the weight is."""
    for part in adapted(parts, options):
        rows, columns = part.shape
        for name, size in {"a": len(part.hf_names) * options.rank * columns, "b": rows * options.rank}.items():
            cut = partition_dim(f"{part.name.removesuffix('.weight')}.adapter.{name}") is not None
            yield Parameter(size // tp if cut else size)


def sync_line(dtype: str, s: ModelShape) -> str:
    """`dtype`: the engine's, as in a recipe."""
    size = (4 if dtype == "fp32" else 2) * s.whole() / 1e6
    lost = f"; rounding to {dtype} loses part of a small change, mismatch/kl shows its cost" if dtype != "fp32" else ""
    return f"sync: the model with its adapters merged, {size:,.1f} MB a time{lost}"


def count(options: Lora, s: ModelShape) -> int:
    """The parameters of all adapters."""
    return total(adapter_chunks(s, options, Layout(1, 1, 1, 1, 1, 1), 0))
