"""The engines that a recipe can name. Each is a folder of `inference`, whose engine.py has `builder`. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineKind:
    """An engine's capabilities, for the checks of a recipe."""

    serves: bool = False  # rollout.placement=server
    recomputes: bool = False  # can recompute the caches of unfinished responses after a weight sync
    reports_routes: bool = False  # the experts that it used for each token of a mixture


ENGINES = {
    "hf": EngineKind(reports_routes=True),
    "vllm": EngineKind(serves=True, recomputes=True),
}
