"""Elementwise parts of a layer with custom backward passes, for hosts without Transformer Engine.

They make fewer passes over memory than megatron-core's eager versions, and save only the input for the backward pass.
"""

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class SwiGLU(torch.autograd.Function):
    """[gate | up] -> silu(gate) * up. Shazeer, arXiv:2002.05202."""

    @staticmethod
    def forward(ctx, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        return out


class GatedActivation(MegatronModule):  # MegatronModule has the sharded_state_dict that checkpoints call
    """`SwiGLU` as the `activation_func` of megatron-core's feed-forward."""

    def forward(self, gate_up: Tensor) -> Tensor:
        return SwiGLU.apply(gate_up)


class Normalise(torch.autograd.Function):
    """x / rms(x) * weight, in x's dtype. Zhang and Sennrich, arXiv:1910.07467.

    With n = x / rms(x) and g the gradient times weight, dx = (g - n mean(g n)) / rms(x). Lower precisions are computed
    in fp32 and rounded once.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide, wide_weight = _wide(x), _wide(weight)
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(wide_weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, inverse = ctx.saved_tensors
        dtypes = x.dtype, weight.dtype
        grad, x, weight = map(_wide, (grad, x, weight))
        product = (grad * x).mul_(inverse).flatten(0, -2)  # grad n
        mean = (product @ weight).view_as(inverse).div_(x.shape[-1])
        grad_x = (grad * weight).mul_(inverse).addcmul_(x, mean.mul_(inverse).mul_(inverse), value=-1)
        return grad_x.to(dtypes[0]), product.sum(0).to(dtypes[1]), None


def _wide(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Rotate(torch.autograd.Function):
    """Rotary position embedding that rotates halves; backward rotates by the opposite angle. Su et al.,
    arXiv:2104.09864."""

    @staticmethod
    def forward(ctx, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(t, cos, sin, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(t: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    """Return t * cos + direction * (-t2, t1) * sin for t = (t1, t2) [.., heads, d]."""
    half = t.shape[-1] // 2
    out = t * cos
    out[..., :half].addcmul_(t[..., half:], sin[..., :half], value=-direction)
    out[..., half:].addcmul_(t[..., :half], sin[..., half:], value=direction)
    return out


def rotary(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
) -> Tensor:
    """Replaces megatron-core's `_apply_rotary_pos_emb_bshd`. t [s, b, heads, d], freqs [s, 1, 1, d]"""
    assert not rotary_interleaved and not multi_latent_attention and mscale == 1.0 and freqs.shape[-1] == t.shape[-1]
    return Rotate.apply(t, freqs.cos().to(t.dtype), freqs.sin().to(t.dtype))
