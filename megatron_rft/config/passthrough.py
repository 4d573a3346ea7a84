"""The fields of megatron-core's configuration classes that a recipe may set, and the reasons why others are refused.

`ast` reads names and types from the installed sources, because importing megatron-core takes seconds and imports torch.
A field is refused if this package sets it itself, or if it would have no effect or a harmful one.
"""

import ast
import importlib.util
from collections.abc import Container
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from megatron_rft.config.messages import at, shown
from megatron_rft.utils.errors import ConfigError, did_you_mean

SECTIONS = {
    "megatron": {
        "TransformerConfig": ("transformer/transformer_config.py", "model_parallel_config.py"),
        "DistributedDataParallelConfig": ("distributed/distributed_data_parallel_config.py",),
    },
    "optimizer": {"OptimizerConfig": ("optimizer/optimizer_config.py",)},
}
CLASSES = {"TransformerConfig", "ModelParallelConfig", "DistributedDataParallelConfig", "OptimizerConfig"}

# section -> reason -> names; * stands for anything
REFUSED = {
    "megatron": {
        "comes from the model's config.json": """
            num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels
            normalization layernorm_* add_bias_linear add_qkv_bias gated_linear_unit glu_linear_offset
            qk_layernorm qk_l2_norm activation_func* rotary_interleaved softmax_scale softmax_type
            window_size window_attn_skip_freq no_rope_freq attention_output_gate
            apply_residual_connection_post_layernorm init_method_std embedding_init_method_std
            num_moe_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate
            moe_layer_freq moe_latent_size moe_router_topk* moe_router_num_groups moe_router_group_topk
            moe_router_pre_softmax moe_router_score_function moe_router_enable_expert_bias
            moe_apply_probs_on_input""",
        "belongs to a model family that is not supported": """
            mtp_* *mamba* linear_* dsa_* experimental_* multi_latent_attention
            is_hybrid_model mrope_section heterogeneous_block_specs hetereogenous_dist_checkpoint""",
        "is set by model.precision": "fp16 bf16 params_dtype pipeline_dtype autocast_dtype enable_autocast fp4*",
        "is set by this package: losses are sums, divided by the counts of the whole mini-batch": """
            calculate_per_token_loss average_in_collective gradient_reduce_div_fusion""",
        "is set by this package, whose micro-batches differ in length": """
            variable_seq_lengths overlap_p2p_comm* batch_p2p_* use_ring_exchange_p2p
            deallocate_pipeline_outputs microbatch_group_size_per_vp_stage
            num_microbatches_with_partial_activation_checkpoints""",
        "needs micro-batches of one length, and here they differ": "*cuda_graph* tp_comm_* symmetric_ar_type",
        "is set by this package, which builds and loads the model": """
            perform_initialization use_cpu_initialization init_model_with_meta_device transformer_impl
            use_te_rng_tracker async_tensor_model_parallel_allreduce moe_extended_tp
            attention_softmax_in_fp32""",
        "needs process groups that this package does not make": """
            num_distributed_optimizer_instances hierarchical_context_parallel_sizes hybrid_context_parallel
            max_seqlen_per_dp_cp_rank""",
        "keeps the weights themselves in FP8, and this package's streams and checkpoints read bf16": """
            fp8_param* reuse_grad_buf_for_mxfp8_param_ag""",
        "needs megatron-core's schedule of overlapped experts, which is not used": """
            delay_wgrad_compute overlap_moe_expert_parallel_comm""",
        "is done by the trainer, which skips a step that is not finite (faults.max_skipped_steps)": "check_for_*",
        "is not used in this package's log-prob path": """
            cross_entropy_* defer_embedding_wgrad_compute wgrad_deferral_limit""",
        "is 0: with dropout the trainer's log-probs would not be those of the policy that sampled": """
            hidden_dropout attention_dropout""",
        "would add a term to the loss, which only the algorithm may define": """
            moe_aux_loss_coeff moe_z_loss_coeff moe_router_load_balancing_type""",
        "would make a token's log-prob depend on the other sequences of its micro-batch": """
            moe_input_jitter_eps moe_token_drop* moe_expert_capacity_factor moe_pad_expert_input_to_capacity
            moe_router_force_load_balancing""",
        "is for Megatron's own inference, which is not used; rollout.engine samples": """
            flash_decode inference_* use_inference_optimized_layers mlp_chunks_for_prefill
            moe_enable_routing_replay""",
        "is for Megatron's FSDP, which is not used; set optimizer.use_distributed_optimizer instead": """
            use_megatron_fsdp use_custom_fsdp *_sharding_strategy fsdp_* nccl_ub
            suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache
            disable_symmetric_registration""",
        "is an option of the section optimizer": "use_distributed_optimizer",
        "belongs to an optimizer or a debugging aid that is not used here": """
            qk_clip* log_max_attention_logit timers config_logger_dir moe_per_layer_logging test_mode
            *kitchen*""",
    },
    "optimizer": {
        "is set by model.precision": "fp16 bf16 fp8_recipe params_dtype *loss_scale* hysteresis",
        "belongs to another optimizer: this package trains with Adam": "optimizer sgd_* muon_*",
        "is not used: all parameters have one learning rate": "decoupled_lr decoupled_min_lr",
        "is an option of the section megatron and applies to both": "overlap_param_gather",
        "keeps the weights themselves in FP8, and this package's streams and checkpoints read bf16": """
            reuse_grad_buf_for_mxfp8_param_ag""",
        "is a debugging aid that is not used here": """
            timers barrier_with_L1_time log_num_zeros_in_grad config_logger_dir""",
    },
}
NUMBER_TYPES = ("float32", "bfloat16", "float16", "uint8")  # for fields of type torch.dtype, by name
PLAIN = {"int": int, "float": (int, float), "bool": bool, "str": str, "Optional": type(None), "None": type(None)}
PLAIN |= {"list": list, "List": list, "tuple": list, "Tuple": list}


@cache
def megatron_core() -> Path:
    """The folder of the installed megatron-core, found without importing it."""
    spec = importlib.util.find_spec("megatron")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / "core" / "model_parallel_config.py").exists():
            return Path(folder) / "core"
    raise ConfigError("megatron-core is not installed: pip install megatron-core psutil")


@cache
def fields(class_name: str) -> dict[str, ast.expr]:
    """Name -> annotation of each field of one of megatron-core's configuration classes, inherited ones included."""
    sources = next(classes[class_name] for classes in SECTIONS.values() if class_name in classes)
    return {name: kind for source in sources for name, kind in class_fields(megatron_core() / source, CLASSES).items()}


def class_fields(source: Path, names: Container[str]) -> dict[str, ast.expr]:
    """Name -> annotation of the public fields of the classes `names` in a Python file, which is not imported."""
    return {
        item.target.id: item.annotation
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in names
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_")
    }


def reason_to_refuse(section: str, name: str) -> str | None:
    for reason, patterns in REFUSED[section].items():
        if any(fnmatch(name, pattern) for pattern in patterns.split()):
            return reason
    return None


def wrong_value(annotation: ast.expr, value: Any) -> str | None:
    """The problem with `value` for a field with this annotation; None if it fits."""
    choices = [node.value for node in ast.walk(annotation) if isinstance(node, ast.Constant)]
    names = {getattr(node, "id", getattr(node, "attr", None)) for node in ast.walk(annotation)}
    if "dtype" in names:
        return None if value in NUMBER_TYPES else f"{shown(value)} is not one of {', '.join(NUMBER_TYPES)}"
    if "Literal" in names:
        allowed = [choice for choice in choices if choice is not None] + ([None] if "Optional" in names else [])
        return None if value in allowed else f"{shown(value)} is not one of {', '.join(map(shown, allowed))}"
    kinds = tuple(PLAIN[name] for name in names if name in PLAIN)
    if not kinds or "Callable" in names:
        return "is a Python object, which a recipe cannot contain"
    if isinstance(value, bool) and "bool" not in names or not isinstance(value, kinds):
        return f"{shown(value)} does not fit megatron-core's type, {ast.unparse(annotation)}"
    return None


def check(section: str, given: dict[str, Any], typed: set[str]) -> None:
    """Refuse fields that a recipe may not set. `typed`: the section's own options, for suggestions."""
    if not given:  # importing this package builds default sections, which must work without megatron-core
        return
    known = {name: annotation for class_name in SECTIONS[section] for name, annotation in fields(class_name).items()}
    for name, value in given.items():
        if name not in known:
            usable = typed | {other for other in known if not reason_to_refuse(section, other)}
            raise at(name, f"neither this package nor the installed megatron-core has it.{did_you_mean(name, usable)}")
        if reason := reason_to_refuse(section, name):
            raise at(name, f"cannot be set: it {reason}")
        if problem := wrong_value(known[name], value):
            raise at(name, problem)
