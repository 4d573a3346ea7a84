"""The recipes of the four trainers, and the sections that differ between them. No torch.

A section that a trainer has without some options is a subclass `without` them (`sections.SectionType`). They cannot be
written then, and code that all trainers share reads their values there.
"""

from typing import Annotated, Any

from pydantic import Field, TypeAdapter, model_validator

from megatron_rft.config import sections as s
from megatron_rft.config.algorithms import SECTIONS
from megatron_rft.config.algorithms.base import Algorithm, Online
from megatron_rft.config.algorithms.offline import FPA, SFT, Offline
from megatron_rft.config.algorithms.online import GRPO, Setting
from megatron_rft.config.constraint import DynamicOptions, into_algorithm
from megatron_rft.config.evaluation import Evaluation
from megatron_rft.config.messages import at
from megatron_rft.config.one_of import OneOf
from megatron_rft.config.recipe import Recipe

CORRECT = (
    "Set algorithm.importance to truncated or masked (importance weights), or algorithm.old_logprobs to rollout (the "
    "ratio is then relative to the policy that sampled)"
)
SEVERAL_STEPS = "leave it out, or set algorithm.mini_batch_prompts or algorithm.epochs"
ON_POLICY = f"where a sampled batch gets one on-policy step, whose ratio is 1: {SEVERAL_STEPS}"
MISMATCH = ["mismatch_kl", "mismatch_share", "on_mismatch"]
ROUNDED = "the engine rounds, so it samples from another policy than the trainer's, and nothing corrects for it."


def one_of(trainer: str, default: str) -> OneOf:
    return OneOf("name", {name: each for name, each in SECTIONS.items() if each.trainer == trainer}, default)


# ---- rl: sample, grade, learn


class OnlineRun(s.Run, without=["epochs"]):
    steps: s.Count  # pyright: ignore[reportGeneralTypeIssues]
    """Training steps, each with a sampled batch."""


class OnlineRecipe(Recipe, trainer="rl"):
    run: OnlineRun
    algorithm: Annotated[Online, one_of("rl", "grpo")] = GRPO()

    @property
    def corrects(self) -> bool:
        """Whether the losses correct for responses sampled by another policy than the trained one. A loss without a
        ratio needs no correction, but PIPO's verification step has a ratio."""
        return self.algorithm.corrects_sampling or not (self.algorithm.has_ratio or self.pipo)

    @property
    def setting(self) -> Setting:
        rollout, algorithm = self.rollout, self.algorithm
        return Setting(
            algorithm.mini_batches(rollout.prompts_per_step),
            rollout.max_response_tokens,
            self.critic,
            reference=self.model.reference is not None,
            staleness=rollout.staleness,
            recomputes=algorithm.old_logprobs == "recompute",
        )

    @property
    def plugins(self) -> list[s.Section]:
        """The plug-ins of the algorithm, the innermost first."""
        return [each for each in (self.constraint if self.refines else None, self.distil, self.pipo) if each]

    @property
    def one_step(self) -> bool:
        """Whether a sampled batch gets one policy step."""
        prompts, algorithm = self.rollout.prompts_per_step, self.algorithm
        return (algorithm.mini_batch_prompts or prompts) == prompts and algorithm.epochs == 1

    @model_validator(mode="before")
    @classmethod
    def _set_kl(cls, value: Any):
        return into_algorithm(value) if isinstance(value, dict) else value

    def _check(self):
        algorithm = self.algorithm
        if self.constraint:
            self._check_constraint()
        measured = self.constraint and (self.constraint.refines or self.constraint.kl_every)
        if self.model.reference and not (measured or algorithm.uses_reference):
            raise at("model.reference", "does nothing without a KL to it: algorithm.kl_coefficient is 0 or missing")
        if not algorithm.of_user:  # training/user_algorithm.py checks a user's class
            name, needed = algorithm.name, algorithm.needs_critic
            if self.critic and not needed:
                raise at("critic", f"does nothing with algorithm {name}, which has no value model: set it to null")
            if needed and not self.critic:
                how = "Give at least critic.lr, e.g. 1e-5"
                raise at("critic", f"is missing: {name} trains a separate value model. {how}")
            if self.critic:
                why = "where a sampled batch gets one step, before which no value has changed"
                self.critic.unused(self.one_step, f"{why}: {SEVERAL_STEPS}", "value_clip", place="critic.")
        if self.critic and self.critic.warmup_steps >= self.run.steps:
            warmup, steps = self.critic.warmup_steps, self.run.steps
            raise at("critic.warmup_steps", f"{warmup} leaves the policy no step: the run has {steps}")
        self._check_teaching()
        if not (self.pipo or algorithm.of_user):
            self._check_ratio()
        if self.rollout.top_k and self.refines:
            why = "does not go with constraint.kind dynamic: refined responses were not sampled from the kept tokens"
            raise at("rollout.top_k", why)
        if self.rollout.staleness:
            self._check_staleness()
        if (rounding := self.vllm.rounding) and not self.corrects:
            raise at(f"vllm.{rounding}", f"{ROUNDED} {CORRECT}")
        limits, colocated = ("engine_start_s", "engine_silence_s"), self.rollout.placement == "colocated"
        self.faults.unused(colocated, "with rollout.placement colocated", *limits, place="faults.")
        self._check_mismatch()

    def _check_teaching(self):
        name = self.algorithm.name
        if self.distil and self.algorithm.compares_distributions:
            raise at("distil", f"the loss of {name} with these options compares with another distribution already")
        if self.pipo and not self.algorithm.uses_rewards:
            raise at("pipo", f"verifies by rewards, and {name} uses none")
        if self.reward.kind == "none" and self.algorithm.uses_rewards:
            raise at("reward.kind", f"none: {name} learns from rewards")

    def _check_constraint(self):
        constraint = self.constraint
        if not self.algorithm.takes_constraint:
            raise at("constraint", f"is for methods with rewards, and the loss of {self.algorithm.name} has none")
        if not isinstance(constraint, DynamicOptions):
            return
        constraint.template_text(self.reward.kind)
        if constraint.agreeing and not self.algorithm.leaves_groups_out:
            raise at("constraint.agreeing", f"does nothing: {self.algorithm.name} leaves no group out here")
        if constraint.first and constraint.first >= self.rollout.group_size:
            raise at("constraint.first", f"does nothing: rollout.group_size is {self.rollout.group_size}")

    def _check_staleness(self):
        stale = self.rollout.staleness
        if self.rollout.placement == "colocated":
            why = "an engine in a rank cannot generate while the rank trains: set rollout.placement=process or server"
            raise at("rollout.staleness", f"{stale}: {why}")
        if not self.corrects:
            why = "responses come from older weights, and nothing corrects for it"
            raise at("rollout.staleness", f"{stale}: {why}. {CORRECT}")

    def _check_mismatch(self):
        """Refuse options of the train-inference mismatch if the run does not measure it."""
        why = None
        if self.rollout.staleness:
            why = "rollout.staleness: responses come from older weights"
        elif self.algorithm.old_logprobs == "rollout":
            why = "algorithm.old_logprobs rollout: the trainer computes no log-probs to compare"
        elif not (self.algorithm.uses_old_logprobs or self.one_step or self.pipo):
            why = f"several steps of {self.algorithm.name} for a batch: no pass comes before the first"
        self.faults.unused(why, f"with {why}", *MISMATCH, place="faults.")

    def _check_ratio(self):
        """Refuse options of the ratio and its clip if there is no ratio or it is always 1."""
        algorithm, clips = self.algorithm, ("clip_low", "clip_high", "dual_clip")
        on_policy = self.one_step and algorithm.old_logprobs == "recompute"
        unused = clips if algorithm.has_ratio else ["importance_cap"]
        algorithm.unused(on_policy, ON_POLICY, *unused, place="algorithm.")
        dead = clips if algorithm.differs("importance_cap") else (*clips, "old_logprobs")
        why = f"without pipo: the loss of {algorithm.name} has no ratio"
        algorithm.unused(not algorithm.has_ratio, why, *dead, place="algorithm.")


# ---- sft and offline: learn from what is given


NOT_TRAINED_ON = ["placement", "processes", "servers", "staleness", "prompts_per_step"]
# A store does not hold the tokens that the engine kept.
TRUNCATION = ["top_k", "top_p", "min_p"]


class RolloutOfOneEngine(s.Rollout, without=[*NOT_TRAINED_ON, *TRUNCATION, "replay_routes"]):
    """Where no policy trains on what each rank's engine samples."""

    replay_routes = "off"


class EvaluationRollout(RolloutOfOneEngine, without=["group_size", "temperature"]):
    """For evaluations, which have their own number of samples and temperature."""


class GivenBatching(s.Batching, without=["skip_zero_advantages"]): ...


class SFTBatching(GivenBatching, without=["forward_only_tokens"]): ...


class SFTModel(s.Model, without=["reference"]): ...


class GivenTracking(s.Tracking, without=["sampled_steps"]):
    sampled_steps = 0


class GivenFaults(s.Faults, without=["engine_start_s", "engine_silence_s", "compare_weights_every", *MISMATCH]): ...


class OfflineEvaluation(Evaluation):
    patience: s.Count | None = None
    """Training ends after this many evaluations without a new best pass@1. None: it runs to its last step."""


class GivenRecipe(Recipe, without=["critic", "distil", "pipo", "constraint"]):
    batching: GivenBatching = GivenBatching()
    rollout: EvaluationRollout = EvaluationRollout()
    tracking: GivenTracking = GivenTracking()
    faults: GivenFaults = GivenFaults()

    def _check(self):
        if (self.run.steps is None) == (self.run.epochs is None):
            fix = ": set one of them to null" if self.run.steps else ""
            raise at("run.steps", f"trainer {self.trainer} needs either run.steps or run.epochs, and not both{fix}")
        why, engine = "without an engine, and nothing is evaluated", self.validates or self.data.test
        self.rollout.unused(not engine, why, "offload_trainer", place="rollout.")


class SFTRecipe(GivenRecipe, trainer="sft"):
    model: SFTModel
    batching: SFTBatching = SFTBatching()
    algorithm: Annotated[Algorithm, one_of("sft", "sft")] = SFT()


class OfflineRecipe(GivenRecipe, trainer="offline"):
    evaluation: OfflineEvaluation = OfflineEvaluation()
    algorithm: Annotated[Offline, one_of("offline", "fpa")] = FPA()

    @property
    def validates(self) -> bool:
        return self.evaluation.every > 0  # on the held-out problems of the store, if nothing else is given

    def _check(self):
        data, never = self.data, not self.evaluation.every
        self.evaluation.unused(never, "while evaluation.every is 0", "patience", place="evaluation.")
        data.unused(never, "while evaluation.every is 0", "validation", place="data.")
        options, store = [name for name in s.Source.model_fields if name != "path"], "with a store of trajectories"
        data.train.unused(True, f"{store}: generate one with this option", *options, place="data.train.")
        data.unused(True, f"{store}: set data.validation.limit, data.test.limit", "limit", place="data.")
        why = "without data.test, data.validation or evaluation.benchmarks: the trajectories have their prompts"
        names = ("prompt_template", "chat", "chat_template_kwargs", "prompt_field", "answer_field", "image_field")
        data.unused(not (data.test or data.validation or self.evaluation.benchmarks), why, *names, place="data.")


# ---- generate: sample and grade once


class GenerateRun(s.Run, without=["steps", "epochs"]): ...


class GenerateModel(SFTModel, without=["initialise", "vision"]): ...


class GenerateData(s.Data, without=["validation", "test", "shuffle"]):
    shuffle = False


class GenerateRollout(RolloutOfOneEngine, without=["offload_trainer"]): ...


class Generation(s.Section):
    """Options of the trajectory store that trainer generate writes into run.output_dir."""

    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of the kept problems that is held out for validation."""
    problems_per_shard: s.Count = 64
    """Problems that are sampled together and written into one file. A killed worker loses at most one such shard."""


TRAINING = ["lora", "megatron", "optimizer", "batching", "algorithm", "critic", "distil", "pipo", "constraint"]


class GenerateRecipe(Recipe, without=[*TRAINING, "evaluation", "checkpoint", "tracking", "faults"], trainer="generate"):
    run: GenerateRun
    model: GenerateModel
    data: GenerateData
    rollout: GenerateRollout = GenerateRollout()
    algorithm = SFT()
    generation: Generation = Generation()


TRAINERS = {"rl": OnlineRecipe, "sft": SFTRecipe, "offline": OfflineRecipe, "generate": GenerateRecipe}
WHOLE = OneOf("trainer", TRAINERS, "rl")
validate = TypeAdapter(Annotated[Recipe, WHOLE]).validate_python
"""The recipe of a mapping of its sections."""
