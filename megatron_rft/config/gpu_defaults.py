"""Options of megatron-core that only make a step faster, and their defaults on GPUs. No torch."""

from megatron_rft.config.sections import Megatron


def overlaps(megatron: Megatron, distributed: bool) -> dict[str, bool]:
    """Of DistributedDataParallelConfig: gradients are reduced during the backward pass and, with the distributed
    optimizer (`distributed`), new weights are gathered during the next forward pass, which needs the former."""
    given = megatron.model_extra or {}
    reduces = given.get("overlap_grad_reduce", True)
    return {"overlap_grad_reduce": True, "overlap_param_gather": reduces and distributed} | {
        name: given[name] for name in ("overlap_grad_reduce", "overlap_param_gather") if name in given
    }


def fusions(mixture: bool, transformer_engine: bool, fused_gradients: bool) -> dict[str, bool]:
    """Of TransformerConfig: gradients of weights are added to the fp32 buffers by the matrix product itself, by apex's
    kernel, and Transformer Engine reorders the tokens of a `mixture` of experts."""
    return {"gradient_accumulation_fusion": fused_gradients, "moe_permute_fusion": mixture and transformer_engine}


def plan_line(megatron: Megatron, distributed: bool, mixture: bool) -> str:
    """For a cluster whose packages are those of requirements-gpu.lock; apex may be there too."""
    given = megatron.model_extra or {}
    found = overlaps(megatron, distributed) | {
        name: bool(given.get(name, default)) for name, default in fusions(mixture, True, False).items()
    }
    on = [name for name, value in found.items() if value]
    apex = "" if "gradient_accumulation_fusion" in given else "; gradient_accumulation_fusion where apex is installed"
    return (
        f"on GPUs: {', '.join(on) or 'nothing overlaps'}{apex}; recompute: {megatron.recompute_granularity or 'none'}"
    )
