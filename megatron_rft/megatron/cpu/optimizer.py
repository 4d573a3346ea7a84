"""The distributed optimizer on a host: its collectives over gloo, and Adam.

gloo's own reduce-scatter copies the whole buffer and sums all of it on every rank, and its all-gather copies what it
received. Here each rank sends to each other rank that one's part only, and nothing if it is alone. Megatron's buffers
hold a rank's own part, so that `output` is a part of `input` or the reverse.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adam import adam

CHUNK = 1 << 20  # elements that are received at a time


def reduce_scatter(
    output: Tensor,  # [n] this rank's part of input
    input: Tensor,  # [ranks * n]
    op: dist.ReduceOp = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
):
    """The sum over ranks, added in the order of the ranks. `input` keeps other values than the sum elsewhere."""
    if async_op or op != dist.ReduceOp.SUM:
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)
    return _reduce_scatter(input, group) if dist.get_world_size(group) > 1 else None


def _reduce_scatter(input: Tensor, group: dist.ProcessGroup | None) -> None:
    rank, parts = dist.get_rank(group), input.view(dist.get_world_size(group), -1)
    others = [r for r in range(len(parts)) if r != rank]
    received = parts.new_empty(len(others), min(CHUNK, parts.shape[1]))
    for chunk in zip(*(part.split(CHUNK) for part in parts), strict=True):
        buffers = received[:, : len(chunk[rank])]
        _exchange([chunk[r] for r in others], list(buffers), others, group)
        ordered = [*buffers[:rank], chunk[rank], *buffers[rank:]]
        total = ordered[0] + ordered[1]
        for each in ordered[2:]:
            total += each
        chunk[rank].copy_(total)


def all_gather(
    output: Tensor,  # [ranks * n]
    input: Tensor,  # [n] this rank's part of output
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
):
    """Every rank's `input`, in the order of the ranks."""
    if async_op:
        return dist.all_gather_into_tensor(output, input, group=group, async_op=True)
    rank, parts = dist.get_rank(group), output.view(dist.get_world_size(group), -1)
    if others := [r for r in range(len(parts)) if r != rank]:
        _exchange([input] * len(others), [parts[r] for r in others], others, group)
    return None


def _exchange(sent: list[Tensor], received: list[Tensor], ranks: list[int], group) -> None:
    """With each of `ranks`, of the group, one tensor each way."""
    works = [dist.isend(tensor, group=group, group_dst=rank) for tensor, rank in zip(sent, ranks, strict=True)]
    works += [dist.irecv(tensor, group=group, group_src=rank) for tensor, rank in zip(received, ranks, strict=True)]
    for work in works:
        work.wait()


class FusedAdam(torch.optim.Optimizer):
    """Adam (decoupled weight decay by default) with FusedAdam's conventions, for hosts without Transformer Engine and
    apex, with GPUs or not. Kingma & Ba, arXiv:1412.6980; Loshchilov & Hutter, arXiv:1711.05101.

    megatron-core 0.16.1's distributed optimizer cannot load a checkpoint into torch's AdamW, which stores `step` in
    each parameter's state; it needs `step` in the parameter group. The arithmetic is torch's.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.decoupled = adam_w_mode

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            states = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))
            options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
            options |= {"amsgrad": False, "maximize": False, "decoupled_weight_decay": self.decoupled, "fused": True}
            counts = torch.full([len(params)], group["step"] - 1.0, device=params[0].device if params else None)
            adam(params, [p.grad for p in params], *states, [], list(counts.unbind()), **options)  # increments these


def install_collectives() -> None:
    """Make megatron-core's gradient and parameter buffers use this file's collectives."""
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer.dist_reduce_scatter_func = reduce_scatter
    param_and_grad_buffer.dist_all_gather_func = all_gather


def install_adam() -> None:
    """Make megatron-core's optimizers use `FusedAdam` if neither transformer-engine nor apex is installed, and on a
    host without a GPU, where theirs cannot be made."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE and torch.cuda.is_available():
        return
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
