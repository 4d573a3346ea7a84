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


def fusions(mixture: bool, transformer_engine: bool, fused_gradients: bool) -> dict[str, bool]:
    """Fields of TransformerConfig: apex's kernel adds weight gradients to the fp32 buffers within the matrix product,
    and Transformer Engine reorders the tokens of a `mixture` of experts."""
    return {"gradient_accumulation_fusion": fused_gradients, "moe_permute_fusion": mixture and transformer_engine}


def plan_line(megatron: Megatron, distributed: bool, mixture: bool) -> str:
    """The plan's line on these options, for the packages of requirements-gpu.lock, with or without apex."""
    given = megatron.extra
    options = overlaps(megatron, distributed) | {
        name: bool(given.get(name, default)) for name, default in fusions(mixture, True, False).items()
    }
    on = [name for name, value in options.items() if value]
    apex = "" if "gradient_accumulation_fusion" in given else "; gradient_accumulation_fusion where apex is installed"
    return (
        f"on GPUs: {', '.join(on) or 'nothing overlaps'}{apex}; recompute: {megatron.recompute_granularity or 'none'}"
    )
