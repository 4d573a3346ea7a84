"""Parts of a layer with custom backward passes for the CPU: the norm, the gated activation, the rotary embedding, and
attention over shared prompts. They make fewer passes over memory than eager operations.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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
        product = (grad * x).flatten(0, -2)  # grad n rms(x)
        mean = (product @ weight).view_as(inverse).div_(x.shape[-1])
        grad_x = (grad * weight).mul_(inverse).addcmul_(x, inverse**3 * mean, value=-1)
        return grad_x.to(dtypes[0]), (inverse.flatten() @ product).to(dtypes[1]), None


def _wide(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def swiglu(gate_up: Tensor) -> Tensor:
    """[gate | up] -> silu(gate) * up. Shazeer, arXiv:2002.05202."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def swiglu_back(grad: Tensor, gate_up: Tensor) -> Tensor:
    """The gradient of `swiglu`'s argument, in the dtype of `grad`."""
    gate, up = gate_up.to(grad.dtype).chunk(2, -1)
    out = torch.empty_like(gate_up, dtype=grad.dtype)
    grad_gate, grad_up = out.chunk(2, -1)
    torch.ops.aten.silu.out(gate, out=grad_up).mul_(grad)
    torch.mul(grad, up, out=grad_gate)
    torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
    return out


class Rotate(torch.autograd.Function):
    """Rotary position embedding that rotates halves of the first 2 n entries, and leaves the rest; backward rotates by
    the opposite angle. Su et al., arXiv:2104.09864. t [.., d], cos and sin [.., 2 n]"""

    @staticmethod
    def forward(ctx, t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(t, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, -1), None, None


def _rotated(t: Tensor, cos: Tensor, sin: Tensor, sign: int = 1) -> Tensor:
    width, half = cos.shape[-1], cos.shape[-1] // 2
    out = torch.empty_like(t) if width == t.shape[-1] else t.clone()
    first, second = t[..., :half], t[..., half:width]
    torch.mul(t[..., :width], cos, out=out[..., :width])
    out[..., :half].addcmul_(second, sin[..., :half], value=-sign)
    out[..., half:width].addcmul_(first, sin[..., half:], value=sign)
    return out


def span(x: Tensor, start: int, end: int) -> Tensor:
    """[T, heads, d] -> [1, heads, end - start, d]"""
    return x[start:end].transpose(0, 1)[None]


flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Fewer keys than this: the kernel's backward pass in bf16 takes up to four times as long as in fp32.
FEW_KEYS = 384

Cells = list[Tensor]  # per bucket of segments of similar length: [n, longest] the token of every cell


class SplitAttention(torch.autograd.Function):
    """Attention with shared prompts on the CPU: two calls of torch's flash attention, whose results are merged by the
    logarithms of their softmax denominators l:

        out = out_own + w (out_prompt - out_own),   w = sigmoid(l_prompt - l_own),   l = log(exp l_own + exp l_prompt)

    (Dao et al., arXiv:2205.14135, section 3.1.) No key is copied, the prompt's part needs no mask, and all responses of
    a group are one call. Backward calls the kernel's backward for each part with the merged `out` and `l`: its softmax
    weights are exp(score - l), so the gradients of the parts add up to that of the whole.

    q [T, heads, d], k and v [T, kv heads, d] -> [T, heads, d], on the CPU.

    `cells` and `places` are the segments' buckets (`torch_attention.buckets`), `groups` those of SharedPrompts.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, cells: Cells, places: Tensor, groups, scale: float | None):
        given = q, k, v.contiguous()  # values are a part of each token, of which torch takes rows slowly
        parts = [flash(*(rows(x, index) for x in given), 0.0, True, scale=scale) for index in cells]
        out = torch.cat([out.transpose(1, 2).flatten(0, 1) for out, _ in parts]).index_select(0, places)
        total = torch.cat([total.transpose(1, 2).flatten(0, 1) for _, total in parts]).index_select(0, places)
        for start, middle, end in groups:
            prompt, of_prompt = flash(span(q, middle, end), *(span(x, start, middle) for x in (k, v)), scale=scale)
            prompt, of_prompt = prompt[0].transpose(0, 1), of_prompt[0].transpose(0, 1)
            weight = torch.sigmoid(of_prompt - total[middle:end]).unsqueeze(-1)
            own = out[middle:end]
            own.copy_(torch.lerp(own.to(weight.dtype), prompt.to(weight.dtype), weight))
            total[middle:end] = torch.logaddexp(total[middle:end], of_prompt)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.cells, ctx.places, ctx.groups, ctx.scale = cells, places, groups, scale
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, out, total = ctx.saved_tensors
        grads = _backward_in_segments(ctx, grad)
        for start, middle, end in ctx.groups:
            ours = [span(x, middle, end) for x in (grad, q, out)]
            prompts = [span(x, start, middle) for x in (k, v)]
            found = _flash_backward(ours[0], ours[1], *prompts, ours[2], total[middle:end].t()[None], False, ctx.scale)
            for each, part, where in zip(grads, found, ((middle, end), (start, middle), (start, middle)), strict=True):
                each[slice(*where)] += part[0].transpose(0, 1)
        return *(each.to(q.dtype) for each in grads), None, None, None, None


def _flash_backward(grad, q: Tensor, k: Tensor, v: Tensor, out, total: Tensor, causal: bool, scale: float | None):
    """The kernel's, in fp32 where it is slow in bf16."""
    if k.shape[2] < FEW_KEYS and k.dtype == torch.bfloat16:
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    return flash_backward(grad, q, k, v, out, total, 0.0, causal, scale=scale)


def _backward_in_segments(ctx, grad: Tensor) -> list[Tensor]:
    """[gradient of q, of k, of v] of the causal part, each [T, heads, d]. A padding cell repeats its segment's last
    token: no gradient comes into it, and so none out of it."""
    q, k, v, out, total = ctx.saved_tensors
    real = torch.zeros(sum(index.numel() for index in ctx.cells), dtype=torch.bool)
    real[ctx.places] = True
    given, gradients, offset = (q, k, v.contiguous(), out), [], 0
    for index in ctx.cells:
        padding = ~real[offset : offset + index.numel()].view(index.shape)
        offset += index.numel()
        wanted = rows(grad, index).masked_fill(padding[:, None, :, None], 0)
        sums = total.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
        parts = [rows(x, index) for x in given]
        gradients.append(_flash_backward(wanted, *parts, sums, True, ctx.scale))
    return [
        torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts]).index_select(0, ctx.places)
        for parts in zip(*gradients, strict=True)
    ]


def rows(x: Tensor, index: Tensor) -> Tensor:
    """[T, heads, d] and [n, longest] -> [n, heads, longest, d]"""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)


def install() -> None:
    """Give megatron-core's layers these functions in place of eager ones."""
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.models.common.embeddings import rope_utils

    fused_bias_swiglu.swiglu, fused_bias_swiglu.swiglu_back = swiglu, swiglu_back
    eager = rope_utils._apply_rotary_pos_emb_bshd

    def rotary(t, freqs, rotary_interleaved=False, multi_latent_attention=False, mscale=1.0):
        if rotary_interleaved or multi_latent_attention:
            return eager(t, freqs, rotary_interleaved, multi_latent_attention, mscale)
        return Rotate.apply(t, *((of(freqs) * mscale).to(t.dtype) for of in (torch.cos, torch.sin)))

    rope_utils._apply_rotary_pos_emb_bshd = rotary
