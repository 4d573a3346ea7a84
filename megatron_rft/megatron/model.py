"""Builds a megatron-core model from a transformers configuration and the recipe's `megatron` section.

The model ends at the final norm: its forward returns hidden states, so that the loss can fuse the output matrix
(`logprobs`). With a value head it returns values instead. `weights.load` sets all weights later.
"""

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu
from megatron.core.models.common.embeddings import rotary_pos_embedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region, layers
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rft.config.gpu_defaults import fusions
from megatron_rft.conversion import padded_vocab
from megatron_rft.families import shapes
from megatron_rft.families.checks import rope, why_unsupported
from megatron_rft.families.tables import EXPERT_BIAS, QK_NORM, family_of
from megatron_rft.families.towers import sees
from megatron_rft.megatron import parallel, vision
from megatron_rft.megatron.packing import Packed
from megatron_rft.megatron.spec import block_spec, has_transformer_engine
from megatron_rft.utils import products
from megatron_rft.utils.errors import ConfigError, DataError

LAYOUT = (*parallel.SIZES, "sequence_parallel", "recompute_granularity", "recompute_method", "recompute_num_layers")


def fields_of(config_class: type, megatron: Any) -> dict[str, Any]:
    """Return the section's passed-through values that are fields of a megatron-core dataclass."""
    known = {f.name for f in dataclasses.fields(config_class)}
    return {k: v for k, v in (getattr(megatron, "model_extra", None) or {}).items() if k in known}


def transformer_config(hf_config: Any, megatron: Any, precision: str) -> TransformerConfig:
    """Translate `hf_config` and the section `megatron` to megatron-core's configuration. precision: fp32 | bf16 |
    fp8."""
    if refused := why_unsupported(hf_config):  # megatron-core's model would silently compute it differently
        raise DataError(refused)
    expert_tensor = megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size
    if megatron.expert_model_parallel_size > 1 and expert_tensor > 1 and not torch.cuda.is_available():
        raise ConfigError("on CPUs, expert parallelism needs megatron.expert_tensor_parallel_size=1 (a limit of gloo)")
    options = {
        **_host(bool(shapes.experts(hf_config))),
        **_architecture(hf_config),
        **_precision(megatron, precision),
        **{name: getattr(megatron, name) for name in LAYOUT},
        "attention_backend": AttnBackend[megatron.attention_backend],
        # micro-batches differ in length; megatron-core then requires this dispatcher, for dense models too
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # makes the schedule and DDP add up gradients: the trainer's losses are already divided by global counts
        "calculate_per_token_loss": True,
        "init_method": _unset,
        "output_layer_init_method": _unset,
        "embedding_init_method": _unset,
        **fields_of(TransformerConfig, megatron),
    }
    if megatron.virtual_pipeline_model_parallel_size is not None:
        # with the default batched exchange megatron-core 0.16.1 silently mixes up the virtual stages' tensors
        options |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    try:
        return (MLATransformerConfig if family_of(hf_config).latent else TransformerConfig)(**options)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"megatron-core refuses this combination of the section `megatron`: {error}") from error


def _unset(weight: Tensor) -> None:
    """Do not initialise: all weights are loaded later. (perform_initialization=False would also skip the
    tensor-parallel attributes.)"""


def _architecture(c: Any) -> dict[str, Any]:
    family, known = family_of(c), shapes.sizes(c, 0)
    options = {
        "num_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_attention_heads,
        "num_query_groups": shapes.kv_heads(c),
        "kv_channels": shapes.head_dim(c),
        "ffn_hidden_size": shapes.dense_ffn(c),
        "normalization": "RMSNorm",
        "layernorm_zero_centered_gamma": family.zero_centred,
        "layernorm_epsilon": c.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": "q_bias" in known,
        # norms over all heads and norms after attention come from `block_spec`
        "qk_layernorm": family.latent or (family.has(QK_NORM) and shapes.first(c, "use_qk_norm", default=True)),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if family.local or _frequencies(c)[1] != 1.0:
        options["softmax_scale"] = _scale(c, "full_attention")
    if shapes.experts(c):
        options |= _experts(c)
    if family.windows:
        options["window_size"] = (c.sliding_window - 1, 0) if c.sliding_window else None
        options["window_attn_skip_freq"] = [int(kind == "sliding_attention") for kind in c.layer_types]
    if family.sinks:
        options |= _sinks(c)
    if family.gemma:
        options |= {"activation_func": partial(F.gelu, approximate="tanh"), "bias_activation_fusion": False}
    if family.gated:
        names = ("key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads", "conv_kernel_dim")
        options |= {f"linear_{name}": getattr(c, f"linear_{name}") for name in names}
        options["linear_attention_freq"] = [int(shapes.is_delta(c, i)) for i in range(c.num_hidden_layers)]
        options |= {"attention_output_gate": True, "moe_shared_expert_gate": bool(shapes.experts(c))}
    if family.tower:  # Transformer Engine's kernel would begin at position 0 in each packed sequence
        options["apply_rope_fusion"] = False
    return options | (_latent(c) if family.latent else {})


def _experts(c: Any) -> dict[str, Any]:
    mixture = [int(shapes.is_mixture(c, i)) for i in range(c.num_hidden_layers)]
    options = {
        "num_moe_experts": shapes.experts(c),
        "moe_ffn_hidden_size": shapes.expert_ffn(c),
        "moe_layer_freq": mixture,
        "moe_router_topk": c.num_experts_per_tok,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": has_transformer_engine(),
    }
    if 1 in mixture:
        options["moe_shared_expert_intermediate_size"] = shapes.sizes(c, mixture.index(1)).get("shared_ffn")
    if not family_of(c).has(EXPERT_BIAS):
        # softmax of the chosen = renormalised softmax of all
        return options | {"moe_router_pre_softmax": not shapes.first(c, "norm_topk_prob", default=True)}
    groups = shapes.first(c, "n_group", default=1)
    return options | {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": c.topk_group if groups > 1 else None,
        "moe_router_topk_scaling_factor": shapes.first(c, "routed_scaling_factor"),
    }


def _sinks(c: Any) -> dict[str, Any]:
    return {
        "softmax_type": "learnable",
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": shapes.first(c, "swiglu_limit", default=7.0),
        "glu_linear_offset": 1.0,
        "bias_activation_fusion": False,  # megatron-core's fused kernel clamps before it adds the bias
        "bias_dropout_fusion": False,  # refused by Transformer Engine's grouped experts with biases
    }


def _latent(c: Any) -> dict[str, Any]:
    scaling = rope(c)
    return {
        "multi_latent_attention": True,
        "q_lora_rank": c.q_lora_rank,
        "kv_lora_rank": c.kv_lora_rank,
        "qk_head_dim": c.qk_nope_head_dim,
        "qk_pos_emb_head_dim": c.qk_rope_head_dim,
        "v_head_dim": c.v_head_dim,
        "num_query_groups": c.num_attention_heads,
        "rope_type": "rope",  # `_set_frequencies` sets YaRN's; these two scale the scores
        "rotary_scaling_factor": scaling.get("factor", 1.0),
        "mscale_all_dim": scaling.get("mscale_all_dim") or 0.0,
        "rotary_base": scaling["rope_theta"],
        "apply_rope_fusion": False,
    }


def _host(mixture: bool) -> dict[str, Any]:
    """Return the options that depend on the machine: fused kernels on GPUs, plain torch otherwise."""
    on_gpu, with_te = torch.cuda.is_available(), has_transformer_engine()
    return {
        "use_cpu_initialization": not on_gpu,
        "bias_activation_fusion": True,  # keeps only its input for the backward pass
        "bias_dropout_fusion": on_gpu,
        "apply_rope_fusion": with_te,
        "masked_softmax_fusion": False,
        # An interleaved pipeline frees a stage's output while it is being sent. NCCL's streams keep the memory; gloo
        # would read freed memory, and gradients would sometimes be wrong.
        "deallocate_pipeline_outputs": on_gpu,
        **(fusions(mixture, with_te) if on_gpu else {"batch_p2p_sync": False}),
    }


def _precision(megatron: Any, precision: str) -> dict[str, Any]:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    if precision == "bf16" and not torch.cuda.is_available():
        products.install_bf16()
    options = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": precision != "fp32"}
    if precision == "fp8":
        options |= {"fp8": megatron.fp8, "fp8_recipe": megatron.fp8_recipe}
        if not megatron.fp8_recipe:  # block scales on Hopper, MXFP8 on Blackwell, else one scale per tensor
            major = torch.cuda.get_device_capability()[0]
            options["fp8_recipe"] = {9: "blockwise", 10: "mxfp8"}.get(major, "tensorwise")
    return options


# FP8 recipe -> the number that the tokens of a matrix product must be a multiple of
FP8_TOKENS = {"blockwise": 128, "mxfp8": 32}


def token_multiple(config: TransformerConfig) -> int:
    """Return the number that the tokens of a rank must be a multiple of."""
    return FP8_TOKENS.get(config.fp8_recipe, 16) if config.fp8 else 1


def build(
    hf_config: Any, megatron: Any, precision: str, *, value_head: bool = False, trains_tower: bool = False
) -> list[GPTModel]:
    """Build this rank's model chunks, one per virtual pipeline stage, not wrapped and without weights. `trains_tower`:
    the vision tower is not frozen."""
    config = transformer_config(hf_config, megatron, precision)
    stages = megatron.virtual_pipeline_model_parallel_size
    chunks = [_chunk(hf_config, config, stage, value_head) for stage in (range(stages) if stages else (None,))]
    for chunk in chunks if sees(hf_config) else ():
        vision.attach(chunk, hf_config, trains_tower)
    return chunks


def _chunk(hf_config: Any, config: TransformerConfig, vp_stage: int | None, value_head: bool) -> GPTModel:
    where, family = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}, family_of(hf_config)
    # Transformer Engine's layers fuse gradient sums without apex. megatron-core's output layer would refuse that.
    layers._grad_accum_fusion_available |= has_transformer_engine()
    model = GPTModel(
        config,
        block_spec(config, vp_stage, family, _scale(hf_config, "sliding_attention") if family.local else None),
        vocab_size=padded_vocab(hf_config.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings and not value_head,
        position_embedding_type="rope",
        rotary_base=rope(hf_config)["rope_theta"],
        rotary_percent=rope(hf_config)["partial_rotary_factor"],
        vp_stage=vp_stage,
    )
    _set_frequencies(model, hf_config)
    if family.gemma and model.pre_process:
        model.embedding.register_forward_hook(_scaled)
    if model.post_process:
        if value_head:
            model.output_layer = ValueHead(config)
        else:
            model.output_layer.__class__ = OutputMatrix
    for parameter in model.parameters():
        # of an expert: otherwise megatron-core adds up the biases' gradients over tensor-parallel ranks, which have
        # different experts, and counts those of the first rank alone in the norm
        if not getattr(parameter, "allreduce", True):
            parameter.sequence_parallel, parameter.tensor_model_parallel = False, True
    return model.to(parallel.device())  # megatron-core makes routers on the host, where DDP misses their gradients


def _scaled(_module: torch.nn.Module, _inputs: Any, embedded: Tensor) -> Tensor:
    """Gemma's embeddings, times a number that transformers rounds to their dtype."""
    return embedded * torch.tensor(embedded.shape[-1] ** 0.5).to(embedded)


def _frequencies(c: Any, layers: str = "full_attention") -> tuple[Tensor | None, float]:
    """transformers' rotary frequencies, and the factor of queries and keys: megatron-core supports only one llama3
    context length. None: the default's. `layers`: of this kind, in a `local` family."""
    found = rope(c, layers)
    if found["rope_type"] != "default":
        own = layers if layers in c.rope_parameters else None
        return ROPE_INIT_FUNCTIONS[found["rope_type"]](c, "cpu", layer_type=own)
    default = 1.0 / found["rope_theta"] ** (torch.arange(0, shapes.head_dim(c), 2).float() / shapes.head_dim(c))
    return (default if family_of(c).local else None), 1.0


def _scale(c: Any, layers: str) -> float:
    """Of the scores in layers of this kind, with scaled queries and scaled keys."""
    return _frequencies(c, layers)[1] ** 2 / shapes.first(c, "query_pre_attn_scalar", default=shapes.head_dim(c)) ** 0.5


def _set_frequencies(model: GPTModel, hf_config: Any) -> None:
    """In the model's rotary embedding, or with latent attention in that of each layer."""
    frequencies, _ = _frequencies(hf_config)
    if family_of(hf_config).local:
        frequencies = torch.cat([frequencies, _frequencies(hf_config, "sliding_attention")[0]])
    for module in model.modules():
        if type(module) is rotary_pos_embedding.RotaryEmbedding:
            module.__class__ = RotaryEmbedding
            module.axis = vision.rotary_axes(hf_config).to(parallel.device()) if sees(hf_config) else None
            if frequencies is not None:
                module.inv_freq = frequencies.to(parallel.device())


class RotaryEmbedding(rotary_pos_embedding.RotaryEmbedding):
    """Uses the position of each token instead of 0, 1, 2 ... if responses share prompts or there are images. `axis`
    [d / 2]: of three positions, the one by which each frequency rotates."""

    axis: Tensor | None

    def get_rotary_seq_len(self, *args, **options):
        """Return the packed parameters instead of a length: megatron-core passes only this result to `forward`."""
        packed = options.get("packed_seq_params", args[-1])
        own = getattr(packed, "position_ids", None) is not None
        return packed if own else super().get_rotary_seq_len(*args, **options)

    def forward(self, length: int | Packed, *args, **options) -> Tensor:
        """[positions, 1, 1, d]"""
        if not isinstance(length, Packed):
            return super().forward(length, *args, **options)
        if length.position_ids.dim() == 2:
            angles = length.position_ids.index_select(0, self.axis).T * self.inv_freq  # [T, d / 2]
            return torch.cat([angles, angles], -1)[:, None, None]
        return super().forward(length.max_seqlen_q, *args, **options).index_select(0, length.position_ids)


class OutputMatrix(ColumnParallelLinear):
    """Stores the output matrix and passes hidden states through: the log-prob functions multiply.

    It stays a called module with the usual name, so that checkpoints, DDP's hooks (which wait for an overlapped
    parameter gather) and tied embeddings work as with the original layer.
    """

    def forward(self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        return input_, None


class ValueHead(torch.nn.Linear):
    """A scalar head instead of the output layer: values [s, b] on every tensor-parallel rank, initially zero.

    The weight is replicated. With sequence parallelism a rank sees only its own tokens, so the gradient is summed over
    the group, like that of a norm.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__(config.hidden_size, 1, bias=False, dtype=config.params_dtype, device=parallel.device())
        torch.nn.init.zeros_(self.weight)
        self.sequence_parallel = self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None):
        values = super().forward(hidden).float()
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values.squeeze(-1), None


def output_weight(model: GPTModel) -> Tensor:
    """Return the output matrix [padded V / tp, H] of a last-stage chunk. Rows from the vocabulary size on are
    padding."""
    tied = model.share_embeddings_and_output_weights
    return model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
