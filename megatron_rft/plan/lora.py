"""Counts the adapters of a recipe, and checks that the model can have them. No torch."""

from collections.abc import Iterator

from megatron_rft.config.lora import Lora
from megatron_rft.config.recipe import Recipe
from megatron_rft.config.sections import Rollout
from megatron_rft.config.vllm import Vllm
from megatron_rft.families.shapes import Part, partition_dim
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.parameters import Parameter, stage_layers, total
from megatron_rft.utils.errors import ConfigError

LAYERS = {  # by target: the weights that get adapters, by megatron-core's names in a layer
    "attention": ("self_attention.linear_proj.weight", "self_attention.linear_qkv.weight"),
    "mlp": ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"),
}


def check(recipe: Recipe, s: ModelShape, engine: str, on_gpu: bool) -> list[str]:
    """Return the plan's lines about the adapters.

    Raises:
        ConfigError: the model cannot have them, or the engine cannot get them apart from the model.
    """
    options, dtype = recipe.lora, recipe.rollout.dtype or recipe.model.precision
    assert options is not None
    _check_model(options, s)
    if options.sync == "adapters":
        _check_sync(engine, recipe.rollout, recipe.vllm, s, on_gpu and dtype == "fp32")
    number = count(options, s)
    size = f"{number / 1e6:.2f} M" if number >= 1e5 else str(number)
    scale = "alpha / sqrt(rank)" if options.use_rslora else "alpha / rank"
    line = (
        f"lora: adapters of rank {options.rank} on {' and '.join(options.targets)}, times {scale} = {options.scale:g}: "
        f"{size} parameters are trained, {number / s.whole():.2%} of the model"
    )
    return [line, _sync_line(options.sync, number, dtype, s)] if recipe.trainer == "rl" else [line]


def _check_model(options: Lora, s: ModelShape) -> None:
    if any(s.mixture) and "mlp" in options.targets:
        raise ConfigError(
            "lora.targets: adapters of experts are not supported, because megatron-core multiplies all experts of a "
            "rank in one grouped product: set it to [attention]"
        )
    every = {part.name: part for layer in s.parts for part in layer}
    for target in options.targets:
        if missing := [name for name in LAYERS[target] if name not in every]:
            what = missing[0].removesuffix(".weight")
            raise ConfigError(f"lora.targets: {target} matches nothing, the layers of this model have no {what}")
    smallest, name = min(
        (size, hf_name)
        for part in adapted(tuple(every.values()), options)
        for hf_name in part.hf_names
        for size in (part.shape[0] // len(part.hf_names) if len(part.hf_names) < 3 else s.kv, part.shape[1])
    )
    if options.rank > smallest:
        name = name.removesuffix(".weight").rpartition(".")[2]
        raise ConfigError(
            f"lora.rank: {options.rank} is above the smallest dimension of an adapted matrix, {smallest} of {name}: a "
            "larger rank adds nothing"
        )


def adapted(layer: tuple[Part, ...], options: Lora) -> Iterator[Part]:
    names = {name for target in options.targets for name in LAYERS[target]}
    return (part for part in layer if part.name in names)


def adapter_chunks(
    s: ModelShape, options: Lora, layout: Layout, stage: int, value_head: bool = False
) -> list[list[Parameter]]:
    """Return the trained parameters of a rank of a pipeline stage, as `parameters.stage_chunks` does for all."""
    stages = stage_layers(s, layout, stage)
    chunks = [[each for parts in layers for each in _layer(parts, options, layout.tp)] for _, layers in stages]
    if value_head and stage == layout.pp - 1:
        chunks[-1].append(Parameter(s.hidden))
    return chunks


def _layer(parts: tuple[Part, ...], options: Lora, tp: int) -> Iterator[Parameter]:
    """a and b of each weight, in the model's order: they are cut as the weight is."""
    for part in adapted(parts, options):
        rows, columns = part.shape
        sizes = {"a": len(part.hf_names) * options.rank * columns, "b": rows * options.rank}
        for name, size in sizes.items():
            cut = partition_dim(f"{part.name.removesuffix('.weight')}.adapter.{name}") is not None
            yield Parameter(size // tp if cut else size)


def _check_sync(engine: str, rollout: Rollout, vllm: Vllm, s: ModelShape, fp32_on_gpu: bool) -> None:
    where = "lora.sync: adapters"
    if (placement := rollout.placement) != "process":
        why = "a colocated engine may drop its weights while the trainer works" if placement == "colocated" else ""
        raise ConfigError(f"{where} needs rollout.placement process; {why or 'servers take merged weights alone'}")
    if engine != "vllm":
        raise ConfigError(f"{where} needs vLLM, and the engine is {engine}")
    for option in ("quantization", "speculative_config"):
        if getattr(vllm, option):
            raise ConfigError(f"{where} does not go with vllm.{option}, where vLLM's LoRA layers were not tested")
    if any(s.mixture):
        raise ConfigError(f"{where} is not for a mixture of experts, where vLLM's LoRA layers were not tested")
    if fp32_on_gpu:
        raise ConfigError(f"{where} needs rollout.dtype bf16 on a GPU: vLLM's LoRA kernels do not compute in fp32")


def _sync_line(sync: str, number: int, dtype: str, s: ModelShape) -> str:
    """Which way the weights go to the engine, and why. `number`: of the adapters' parameters. `dtype`: the engine's, as
    in a recipe."""
    size = 4 if dtype == "fp32" else 2
    merged, alone = (f"{size * n / 1e6:,.1f} MB" for n in (s.whole(), number))
    if sync == "adapters":
        return (
            f"sync: the adapters alone, {alone} a time instead of {merged}; vLLM keeps the model and adds B A x, "
            "rounding nothing of a small change away"
        )
    lost = f"; rounding to {dtype} loses part of a small change, mismatch/kl shows its cost" if dtype != "fp32" else ""
    return (
        f"sync: the model with its adapters merged, as every engine takes it, {merged} a time (lora.sync=adapters: "
        f"{alone}){lost}"
    )


def count(options: Lora, s: ModelShape) -> int:
    """The parameters of all adapters."""
    return total(adapter_chunks(s, options, Layout(1, 1, 1, 1, 1, 1), 0))
