"""Whether the trainer of a mixture computes with the engine's experts. No torch."""

from megatron_rft.config.engines import ENGINES
from megatron_rft.config.lora import Lora
from megatron_rft.config.sections import Megatron, Rollout
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.utils.errors import ConfigError


def why_not_replayed(rollout: Rollout, shape: ModelShape | None, engine: str) -> str:
    """Return the reason why the trainer's routers choose the experts; empty if the engine's are replayed."""
    if shape and not shape.experts:
        return "the model has no experts"
    if not ENGINES[engine].reports_routes:
        return f"the {engine} engine does not report its experts"
    return "rollout.replay_routes is off" if rollout.replay_routes == "off" else ""


def check(rollout: Rollout, megatron: Megatron, shape: ModelShape | None, engine: str) -> list[str]:
    """Check the options of router replay, and return the plan's line; none for a model without experts."""
    off, why = rollout.replay_routes == "off", why_not_replayed(rollout, shape, engine)
    if off and not why.startswith("rollout.replay_routes"):
        raise ConfigError(f"rollout.replay_routes: off does nothing: {why}. Leave it out")
    if not why and megatron.extra.get("moe_router_fusion"):
        raise ConfigError(
            "megatron.moe_router_fusion: this kernel chooses the experts itself, and the engine's are to be used. "
            "Leave it out, or set rollout.replay_routes=off"
        )
    if not shape or not shape.experts:
        return []
    return [f"experts: {f'chosen by the trainer, {why}' if why else 'those that the engine used for each token'}"]


def check_balancing(megatron: Megatron, lora: Lora | None, shape: ModelShape | None) -> None:
    """Check that megatron.moe_router_bias_update_rate has an effect."""
    if not megatron.moe_router_bias_update_rate or not shape:
        return
    why = "the routers of this model have no expert bias" if not shape.expert_bias else ""
    why = why or ("the biases belong to the frozen model beside `lora`" if lora else "")
    if not why and megatron.extra.get("moe_router_fusion"):
        why = "megatron.moe_router_fusion counts no loads"
    if why:
        raise ConfigError(f"megatron.moe_router_bias_update_rate: does nothing: {why}. Leave it out")
