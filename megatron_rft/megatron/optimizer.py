"""Wraps Megatron's optimizer and schedule in one `step`, which does not apply a gradient that is not finite."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rft.megatron.seams import named
from megatron_rft.utils.errors import ConfigError


class ActorOptimizer:
    """The optimizer of a list of DDP-wrapped model chunks.

    Besides the moments "own" it may have other named sets: a step with one set does not change the others. Each set
    counts its steps separately, for Adam's bias correction.

    `options` has fields of OptimizerConfig and of the schedule, with Megatron's names. The schedule advances *before*
    its step, so that the first of W warm-up steps runs at lr / W and not at 0.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        options: dict[str, Any],
        precision: str,
        total_steps: int,
        moments: tuple[str, ...] = (),
    ):
        config = optimizer_config(options, precision)
        self.megatron = get_megatron_optimizer(config, chunks)
        self.parts = self.megatron.chained_optimizers  # of dense parameters, and of experts
        self.clip_grad = config.clip_grad
        self.moments = {name: [_Moments() for _ in self.parts] for name in moments}
        warmup, steps = options.get("lr_warmup_steps") or 0, options.get("lr_decay_steps") or total_steps
        rates = {"init_lr": 0.0, "max_lr": config.lr, "min_lr": config.min_lr or 0.0}
        decay = {"start_wd": config.weight_decay, "end_wd": config.weight_decay}
        self.schedule = OptimizerParamScheduler(
            self.megatron,
            **rates,
            lr_warmup_steps=warmup,
            lr_decay_steps=max(steps, warmup + 1),
            lr_decay_style=options.get("lr_decay_style") or "constant",
            **decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @property
    def every_moments(self) -> tuple[str, ...]:
        """The names of all sets. "own" comes last, so that loading in this order ends with it in use."""
        return (*self.moments, "own")

    def fill_in(self) -> None:
        """Create zeros for moments that no step has set yet: a checkpoint needs all sets, and their memory is taken
        before an engine measures what is free."""
        for name in self.every_moments:
            with self.using(name):
                for part in self.parts:
                    _fill_in(part)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Use the moments `name` in this context."""
        others = self.moments[name] if name != "own" else []
        for part, other in zip(self.parts, others, strict=False):
            other.exchange(part.optimizer)
        try:
            yield
        finally:
            for part, other in zip(self.parts, others, strict=False):
                other.exchange(part.optimizer)

    @property
    def learning_rate(self) -> float:
        return max(group["lr"] for group in self.megatron.param_groups)

    @named(part="optimizer")
    def step(self, learning_rate: float | None = None, moments: str = "own") -> tuple[bool, float]:
        """Make a step with the gradients in the DDP buffers and `learning_rate` or the schedule's next rate.

        Returns (applied, gradient norm before clipping). A gradient with a NaN or an infinity is not applied: weights,
        moments and schedule stay unchanged.
        """
        optimizer = self.megatron
        overflow = optimizer.prepare_grads()
        norm = float(optimizer.get_grad_norm())
        if overflow or not math.isfinite(norm):
            return False, norm
        if learning_rate is None:
            self.schedule.step(1)
        else:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * group.get("lr_mult", 1.0)
        for part in self.parts if self.clip_grad > 0 else ():
            if parameters := part.get_parameters():
                # a precision-aware optimizer reads its gradients from `decoupled_grad`
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, self.clip_grad, norm, decoupled)
        with self.using(moments):
            optimizer.step_with_ready_grads()
        self.schedule.step(0)  # restore the schedule's rate after another one, for the log and the next step
        return True, norm

    def grad_norm(self) -> float:
        """Return the norm of the gradients in the DDP buffers, before clipping, without a step."""
        self.megatron.prepare_grads()
        return float(self.megatron.get_grad_norm())

    def tensors(self) -> Iterator[torch.Tensor]:
        """The parameters that the optimizer steps on, and all sets of moments."""
        for i, part in enumerate(self.parts):
            if part.optimizer is None:  # of a rank without such parameters
                continue
            states = [part.optimizer.state, *(self.moments[name][i].state for name in self.moments)]
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in states:
                yield from (x for of_one in state.values() for x in of_one.values() if isinstance(x, torch.Tensor))


def optimizer_config(options: dict[str, Any], precision: str) -> OptimizerConfig:
    """Return megatron-core's configuration from those of the `options` that it has. Raises ConfigError if megatron-core
    refuses their combination."""
    kinds = {field.name: field.type for field in dataclasses.fields(OptimizerConfig)}
    given = {
        name: getattr(torch, value) if kinds[name] is torch.dtype else value  # a recipe names a dtype
        for name, value in options.items()
        if name in kinds and value is not None
    }
    # Checkpoints have fp32 weights, and remainders are what they have more than the model's own: 16 bits as an int16.
    given |= {"params_dtype": torch.float32 if precision == "fp32" else torch.bfloat16, "store_param_remainders": False}
    try:
        return OptimizerConfig(**given, bf16=precision != "fp32")
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"megatron-core refuses this combination of the section `optimizer`: {error}") from error


def _fill_in(part: Any) -> None:
    if part.init_state_fn is None:  # an optimizer on the host creates its moments in its first step
        return
    if part.config.use_precision_aware_optimizer:  # megatron-core 0.16.1 calls it without its second argument
        for parameter in (each for group in part.optimizer.param_groups for each in group["params"]):
            if not part.optimizer.state[parameter]:
                part.optimizer.initialize_state(parameter, store_param_remainders=False)
    else:
        part.init_state_fn(part.optimizer, part.config)


class _Moments:
    """Stores Adam's state of one optimizer while it is not in use."""

    def __init__(self) -> None:
        self.state: dict[torch.nn.Parameter, dict] = defaultdict(dict)
        self.steps: list[int] | None = None

    def exchange(self, optimizer: torch.optim.Optimizer) -> None:
        """Swap the stored state with the optimizer's."""
        groups = optimizer.param_groups
        steps = [group.get("step", 0) for group in groups]
        optimizer.state, self.state = self.state, optimizer.state
        for group, step in zip(groups, self.steps or [0] * len(groups), strict=True):
            group["step"] = step
        self.steps = steps
