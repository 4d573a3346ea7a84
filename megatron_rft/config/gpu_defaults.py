"""Defaults on GPUs of megatron-core's options that only make a step faster. No torch."""

from megatron_rft.config.sections import Megatron


def overlaps(megatron: Megatron, distributed: bool) -> dict[str, bool]:
    """Fields of DistributedDataParallelConfig: reduce gradients during the backward pass and, with the distributed
    optimizer (`distributed`), gather new weights during the next forward pass, which requires the former."""
    given = megatron.extra
    reduces = given.get("overlap_grad_reduce", True)
    return {"overlap_grad_reduce": True, "overlap_param_gather": reduces and distributed} | {
        name: given[name] for name in ("overlap_grad_reduce", "overlap_param_gather") if name in given
    }


def fusions(mixture: bool, transformer_engine: bool) -> dict[str, bool]:
    """Fields of TransformerConfig: Transformer Engine adds weight gradients to the fp32 buffers within the matrix
    product, and reorders the tokens of a `mixture` of experts."""
    return {"gradient_accumulation_fusion": transformer_engine, "moe_permute_fusion": mixture and transformer_engine}


def plan_line(megatron: Megatron, distributed: bool, mixture: bool) -> str:
    """The plan's line on these options, for the packages of requirements-gpu.lock."""
    given = megatron.extra
    options = overlaps(megatron, distributed)
    options |= {name: bool(given.get(name, default)) for name, default in fusions(mixture, True).items()}
    on = [name for name, value in options.items() if value]
    return f"on GPUs: {', '.join(on) or 'nothing overlaps'}; recompute: {megatron.recompute_granularity or 'none'}"
