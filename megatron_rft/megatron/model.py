"""Builds a megatron-core model from a transformers configuration and the recipe's `megatron` section.

The model ends at the final norm: its forward returns hidden states, so that the loss can fuse the output matrix
(`logprobs`). With a value head it returns values instead. `weights.load` sets all weights later.
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rotary_pos_embedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rft.config.gpu_defaults import fusions
from megatron_rft.conversion import padded_vocab
from megatron_rft.conversion.mapping import is_mixture
from megatron_rft.families import family_of, head_dim
from megatron_rft.megatron import parallel
from megatron_rft.megatron.packing import SharedPrompts
from megatron_rft.megatron.spec import block_spec, has_transformer_engine
from megatron_rft.utils.device import TRANSFORMER_ENGINE_INSTALL, has_fused_gradients
from megatron_rft.utils.errors import ConfigError, DataError

LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
)
ROPE_TYPES = ("default", "linear", "llama3")  # types that only change the frequencies


def fields_of(config_class: type, megatron: Any) -> dict[str, Any]:
    """Return the section's passed-through values that are fields of a megatron-core dataclass."""
    known = {f.name for f in dataclasses.fields(config_class)}
    return {k: v for k, v in (getattr(megatron, "model_extra", None) or {}).items() if k in known}


def transformer_config(hf_config: Any, megatron: Any, precision: str) -> TransformerConfig:
    """Translate `hf_config` and the section `megatron` to megatron-core's configuration. precision: fp32 | bf16 |
    fp8."""
    check_architecture(hf_config)
    _check_options(hf_config, megatron, precision)
    options = {
        **_architecture(hf_config),
        **_host(family_of(hf_config).experts),
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
        return TransformerConfig(**options)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"megatron-core refuses this combination of the section `megatron`: {error}") from error


def check_architecture(hf_config: Any) -> None:
    """Raise DataError for a configuration that megatron-core's model would silently compute differently."""
    family_of(hf_config)
    c, refused = hf_config, []
    if c.hidden_act != "silu":
        refused.append(f"hidden_act {c.hidden_act!r} (only 'silu')")
    sliding = getattr(c, "use_sliding_window", True) and getattr(c, "sliding_window", None)
    if sliding or set(getattr(c, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        refused.append("sliding-window attention (set use_sliding_window to false if the context fits in the window)")
    refused += [f"{name}: true" for name in ("attention_bias", "mlp_bias") if getattr(c, name, False)]
    rope = c.rope_parameters
    if rope["rope_type"] not in ROPE_TYPES:
        refused.append(f"rope_type {rope['rope_type']!r} (only {', '.join(ROPE_TYPES)})")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        refused.append(f"partial_rotary_factor {rope['partial_rotary_factor']} (only 1.0)")
    if refused:
        raise DataError(f"this {c.model_type} model's configuration cannot be represented: " + "; ".join(refused))


def _check_options(hf_config: Any, m: Any, precision: str) -> None:
    if family_of(hf_config).experts and m.tensor_model_parallel_size > 1 and not m.sequence_parallel:
        raise ConfigError("tensor parallelism of a mixture of experts needs megatron.sequence_parallel=true")
    experts_cut = (
        m.expert_model_parallel_size > 1 and (m.expert_tensor_parallel_size or m.tensor_model_parallel_size) > 1
    )
    if experts_cut and not torch.cuda.is_available():
        raise ConfigError(
            "without GPUs, expert parallelism needs megatron.expert_tensor_parallel_size=1 (a limit of gloo)"
        )
    if precision == "fp8" and not has_transformer_engine():
        raise ConfigError(
            "model.precision fp8 needs Transformer Engine and a GPU, which are not both here: choose bf16, or install "
            "it: " + TRANSFORMER_ENGINE_INSTALL
        )


def _unset(weight: Tensor) -> None:
    """Do not initialise: all weights are loaded later. (perform_initialization=False would also skip the
    tensor-parallel attributes.)"""


def _architecture(c: Any) -> dict[str, Any]:
    family = family_of(c)
    options = {
        "num_layers": c.num_hidden_layers,
        "hidden_size": c.hidden_size,
        "num_attention_heads": c.num_attention_heads,
        "num_query_groups": c.num_key_value_heads,
        "kv_channels": head_dim(c),
        "ffn_hidden_size": c.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": c.rms_norm_eps,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if not family.experts:
        return options
    return options | {
        "num_moe_experts": c.num_experts,
        "moe_ffn_hidden_size": c.moe_intermediate_size,
        "moe_layer_freq": [int(is_mixture(c, i)) for i in range(c.num_hidden_layers)],
        "moe_router_topk": c.num_experts_per_tok,
        "moe_router_pre_softmax": not c.norm_topk_prob,  # softmax of the chosen = renormalised softmax of all
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": has_transformer_engine(),
    }


def _host(mixture: bool) -> dict[str, Any]:
    """Return the options that depend on the machine: fused kernels on GPUs, plain torch otherwise."""
    on_gpu, with_te = torch.cuda.is_available(), has_transformer_engine()
    return {
        "use_cpu_initialization": not on_gpu,
        "bias_activation_fusion": with_te,
        "use_te_activation_func": not with_te,  # means: use the spec's activation, `torch_layers.GatedActivation`
        "bias_dropout_fusion": on_gpu,
        "apply_rope_fusion": with_te,
        "masked_softmax_fusion": False,
        # An interleaved pipeline frees a stage's output while it is being sent. NCCL's streams keep the memory; gloo
        # would read freed memory, and gradients would sometimes be wrong.
        "deallocate_pipeline_outputs": on_gpu,
        **(fusions(mixture, with_te, has_fused_gradients()) if on_gpu else {"batch_p2p_sync": False}),
    }


def _precision(megatron: Any, precision: str) -> dict[str, Any]:
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    options = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": precision != "fp32"}
    if precision == "fp8":
        options |= {"fp8": megatron.fp8, "fp8_recipe": megatron.fp8_recipe or fp8_recipe_of_device()}
    return options


def fp8_recipe_of_device() -> str:
    """Return the FP8 recipe of this GPU: block scales on Hopper, MXFP8 on Blackwell, else one scale per tensor."""
    major = torch.cuda.get_device_capability()[0]
    return {9: "blockwise", 10: "mxfp8"}.get(major, "tensorwise")


# FP8 recipe -> the number that the tokens of a matrix product must be a multiple of
FP8_TOKENS = {"blockwise": 128, "mxfp8": 32}


def token_multiple(config: TransformerConfig) -> int:
    """Return the number that the tokens of a rank must be a multiple of."""
    return FP8_TOKENS.get(config.fp8_recipe, 16) if config.fp8 else 1


def build(hf_config: Any, megatron: Any, precision: str, *, value_head: bool = False) -> list[GPTModel]:
    """Build this rank's model chunks, one per virtual pipeline stage, not wrapped and without weights."""
    config = transformer_config(hf_config, megatron, precision)
    stages = range(megatron.virtual_pipeline_model_parallel_size or 1)
    virtual = megatron.virtual_pipeline_model_parallel_size is not None
    return [_chunk(hf_config, config, stage if virtual else None, value_head) for stage in stages]


def _chunk(hf_config: Any, config: TransformerConfig, vp_stage: int | None, value_head: bool) -> GPTModel:
    where = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    model = GPTModel(
        config,
        block_spec(config, vp_stage),
        vocab_size=padded_vocab(hf_config.vocab_size, config.tensor_model_parallel_size),
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings and not value_head,
        position_embedding_type="rope",
        rotary_base=hf_config.rope_parameters["rope_theta"],
        vp_stage=vp_stage,
    )
    model.rotary_pos_emb.__class__ = RotaryEmbedding
    rope_type = hf_config.rope_parameters["rope_type"]
    if rope_type != "default":  # transformers' frequencies: megatron-core supports only one llama3 context length
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope_type](hf_config, "cpu")
        assert scale == 1.0, f"{rope_type} also scales attention by {scale}"
        model.rotary_pos_emb.inv_freq = frequencies.to(parallel.device())
    if model.post_process:
        if value_head:
            model.output_layer = ValueHead(config)
        else:
            model.output_layer.__class__ = OutputMatrix
    return model.to(parallel.device())  # megatron-core makes routers on the host, where DDP misses their gradients


class RotaryEmbedding(rotary_pos_embedding.RotaryEmbedding):
    """Uses the position of each token instead of 0, 1, 2 ... if responses share prompts."""

    def get_rotary_seq_len(self, *args, **options):
        """Return the packed parameters instead of a length: megatron-core passes only this result to `forward`."""
        packed = options.get("packed_seq_params", args[-1])
        return packed if isinstance(packed, SharedPrompts) else super().get_rotary_seq_len(*args, **options)

    def forward(self, length: int | SharedPrompts, *args, **options) -> Tensor:
        """[positions, 1, 1, d]"""
        if not isinstance(length, SharedPrompts):
            return super().forward(length, *args, **options)
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
    return (
        model.shared_embedding_or_output_weight()
        if model.share_embeddings_and_output_weights
        else model.output_layer.weight
    )
