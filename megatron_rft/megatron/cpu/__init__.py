"""What megatron-core needs to run on a host without CUDA, and to be fast there. `install` is the only entry.

without_cuda  redirects megatron-core's modules to the CPU
optimizer     the distributed optimizer's collectives over gloo, and Adam (on GPUs without Transformer Engine too)
layers        norm, gated activation, rotary embedding, and attention over shared prompts
"""

import functools
import os

import torch

from megatron_rft.megatron.cpu import layers, optimizer, without_cuda
from megatron_rft.utils import products
from megatron_rft.utils.device import keep_large_blocks


@functools.cache
def install() -> None:
    """Prepare megatron-core for this host, once. `megatron_rft.megatron` calls it on import."""
    if not torch.cuda.is_available():
        without_cuda.redirect()
        optimizer.install_collectives()
        products.install_fp32()
        for name, count in products.FEW_KERNELS.items():
            os.environ.setdefault(name, count)
        keep_large_blocks()
        layers.install()
    _without_transformer_engine()
    optimizer.install_adam()


def _without_transformer_engine() -> None:
    """Correct megatron-core 0.16.1 without Transformer Engine: define a name whose absence raises NameError in its
    router; and a flag, because its import of TELinear succeeds, and then isinstance fails, as that is no class."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False
