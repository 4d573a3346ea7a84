"""The engines that a recipe can name. Each is a folder of `inference`, whose engine.py has `builder`. No torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineKind:
    """What the checks of a recipe need to know of an engine."""

    serves: bool = False  # rollout.placement=server
    drafts: bool = False  # speculative decoding with the drafts that requests carry
    recomputes: bool = False  # after new weights it can compute the caches of unfinished responses again


ENGINES = {
    "hf": EngineKind(),
    "vllm": EngineKind(serves=True, drafts=True, recomputes=True),
}
