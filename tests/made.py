"""Creates objectives for tests from the options that differ from the defaults, and samples whole steps."""

from collections.abc import Callable
from typing import Any

from megatron_rft import objectives
from megatron_rft.config import Recipe, load
from megatron_rft.config.algorithms import SECTIONS
from megatron_rft.config.algorithms.online import Critic
from megatron_rft.config.constraint import DynamicOptions
from megatron_rft.config.plugins import PIPO as PIPOSection
from megatron_rft.config.plugins import Distil, Teaching
from megatron_rft.objectives.base import Objective, PolicyObjective, Setting
from megatron_rft.objectives.plugins.distil import Distilled
from megatron_rft.objectives.plugins.dynamic import DynamicConstraint
from megatron_rft.objectives.plugins.pipo import PIPO
from megatron_rft.records import Prompt
from megatron_rft.rollout.sampler import Keep, Sampled, Sampler

OF_A_RUN = ("mini_batches", "max_response_tokens")
ONLINE = [name for name, section in SECTIONS.items() if section.trainer == "rl" and not section.of_user]
OFFLINE = [name for name, section in SECTIONS.items() if section.trainer == "offline"]


def made(name: str, critic: dict | None = None, **options) -> Objective:
    """The algorithm of that name. `options`: of its section and of the run. It has a critic if it needs one."""
    section = SECTIONS[name]
    run = {key: options.pop(key) for key in OF_A_RUN if key in options}
    if issubclass(section, Teaching):
        options = {"teacher": "a/teacher"} | options
    if getattr(section, "needs_critic", False):
        run["critic"] = Critic(lr=1e-5, **(critic or {}))
    return objectives.build(section(**options), Setting(**run))


def pipo(base: PolicyObjective, staleness: int = 0, old_logprobs: str = "recompute", **options) -> PIPO:
    setting = Setting(staleness=staleness, recomputes=old_logprobs == "recompute")
    return PIPO(base, PIPOSection(**options), setting)


def distilled(base: PolicyObjective, **options) -> Distilled:
    return Distilled(base, Distil(teacher="a/teacher", **options))


def dynamic(base: PolicyObjective, eta: float = 1e-3, **options) -> DynamicConstraint:
    return DynamicConstraint(base, DynamicOptions(eta=eta, **options))


class WholeStep(Sampler):
    """A sampler that samples a step at once, as a run does without staleness."""

    def sample(
        self, draw: Callable[[int], list[Prompt]], count: int, step: int, keep: Keep | None = None, max_rounds: int = 1
    ) -> Sampled:
        self.keep, self.max_rounds = keep, max_rounds
        return self.conclude(self.collect(self.begin(draw(count), step), draw, count), step)


def recipe(**sections: Any) -> Recipe:
    """The smallest recipe, with other options by section."""
    least = {"run": {"output_dir": "run", "steps": 1}, "model": {"path": "model"}, "data": {"train": "arithmetic"}}
    return load(least, **sections)
