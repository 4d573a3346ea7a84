"""Adam with FusedAdam's conventions, for hosts without transformer-engine and apex.

megatron-core 0.16.1's distributed optimizer cannot load a checkpoint into torch's AdamW, which stores `step` in each
parameter's state; it needs an optimizer that stores `step` in the parameter group, as FusedAdam does. The arithmetic is
torch's.
"""

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw


class FusedAdam(torch.optim.Optimizer):
    """Adam (decoupled weight decay by default) with `step` in the parameter group.

    Kingma & Ba, arXiv:1412.6980; Loshchilov & Hutter, arXiv:1711.05101.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.update = adamw if adam_w_mode else adam

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            beta1, beta2 = group["betas"]
            self.update(
                params,
                [p.grad for p in params],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [torch.tensor(group["step"] - 1.0) for _ in params],  # the functional form increments the count
                fused=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def install() -> None:
    """Make megatron-core's optimizers use `FusedAdam` if neither transformer-engine nor apex is installed."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
