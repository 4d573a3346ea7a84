"""megatron-rft: reinforcement fine-tuning of language models on megatron-core and vLLM.

    import megatron_rft as rft

    run = rft.train("recipe.yaml", rollout={"group_size": 16})
    run.of("reward/mean")

docs/python.md has the whole interface. Nothing is imported before it is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_rft.api import convert, evaluate, generate, grade, train
    from megatron_rft.config import load
    from megatron_rft.plan import plan
    from megatron_rft.report import runs

__version__ = "0.1.0"
WHERE = dict.fromkeys(("convert", "evaluate", "generate", "grade", "train"), "api") | {"load": "config", "plan": "plan"}
__all__ = ["convert", "evaluate", "generate", "grade", "load", "plan", "runs", "train"]


def __getattr__(name: str) -> Any:
    if name == "runs":
        return import_module("megatron_rft.report.runs")
    if name not in WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"megatron_rft.{WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
