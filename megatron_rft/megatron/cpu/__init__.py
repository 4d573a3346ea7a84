"""What megatron-core needs to run on a host without CUDA, and to be fast there. `install` is the only entry.

without_cuda  redirects megatron-core's modules to the CPU
optimizer     the distributed optimizer's collectives over gloo, and Adam, also on GPUs without Transformer Engine
layers        norm, activation (on GPUs without Transformer Engine too), rotary embedding, attention over shared prompts
"""

import functools
import importlib.util

import torch

from megatron_rft.megatron.cpu import optimizer, without_cuda
from megatron_rft.utils.errors import UserError


@functools.cache
def install() -> None:
    """Prepare megatron-core for this host, once. `megatron_rft.megatron` calls it on import."""
    if importlib.util.find_spec("psutil") is None:
        # megatron-core does not require it, but `dist_checkpointing.save` hangs without it
        raise UserError("megatron-core needs the package psutil, which is not installed: pip install psutil")
    if not torch.cuda.is_available():
        without_cuda.redirect()
        optimizer.share_gloo_device()
        optimizer.install_collectives()
        _lean_rotary()
        _scale_in_place()
    _router_without_transformer_engine()
    _latent_attention_without_transformer_engine()
    optimizer.install_adam()


def _router_without_transformer_engine() -> None:
    """Define a name whose absence raises NameError in megatron-core 0.16.1's router without Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)


def _latent_attention_without_transformer_engine() -> None:
    """Correct megatron-core 0.16.1's flag: without Transformer Engine its import of TELinear succeeds, and then
    isinstance fails, because that is no class."""
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def _lean_rotary() -> None:
    from megatron.core.models.common.embeddings import rope_utils

    from megatron_rft.megatron.cpu.layers import rotary

    rope_utils._apply_rotary_pos_emb_bshd = rotary  # the module calls it by this name, also for packed sequences


def _scale_in_place() -> None:
    """Clipping multiplies gradients by a factor; megatron-core's fallback makes a product and copies it back."""
    from megatron.core.optimizer import clip_grads

    def scale(chunk_size, noop_flag, tensor_lists, factor):
        sources, targets = tensor_lists
        for source, target in zip(sources, targets, strict=True):
            torch.mul(source, factor, out=target)

    clip_grads.multi_tensor_scale_impl = scale
