"""A whole recipe: its sections, the checks across sections, and the options that a trainer does not use."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from megatron_rft.config import constraint as c
from megatron_rft.config import offline as o
from megatron_rft.config import sections as s
from megatron_rft.config.algorithms import AnyAlgorithm
from megatron_rft.config.algorithms.ppo import Critic
from megatron_rft.config.algorithms.sft import SFT
from megatron_rft.config.messages import at
from megatron_rft.config.pipo import PIPO
from megatron_rft.config.rewards import Reward
from megatron_rft.config.vllm import Vllm

OF_ENGINES = (
    "rollout.placement",
    "rollout.processes",
    "rollout.servers",
    "rollout.staleness",
    "faults.engine_start_s",
    "faults.engine_silence_s",
)
# Options without effect with a trainer. They are refused if given.
UNUSED = {
    "rl": ("run.epochs", "generation"),
    "sft": (
        *OF_ENGINES,
        "rollout.prompts_per_step",
        "rollout.group_size",
        "rollout.temperature",
        "model.reference",
        "batching.forward_only_tokens",
        "pipo",
        "constraint",
        "critic",
        "generation",
        "tracking.sampled_steps",
    ),
    "offline": (*OF_ENGINES, *o.UNUSED_IN_TRAINING),
    "generate": (*OF_ENGINES, *o.UNUSED_IN_GENERATION),
}
CHAT_MARKERS = 128  # an upper bound of a chat template's tokens around one turn, with a system prompt
CORRECT = (
    "Set algorithm.importance to truncated or masked (importance weights), or algorithm.old_logprobs to rollout (the "
    "ratio is then relative to the policy that sampled)"
)
ON_POLICY = (
    "does nothing where a sampled batch gets one on-policy step, whose ratio is 1: leave it out, or set "
    "algorithm.mini_batch_prompts or algorithm.epochs"
)
ROUNDED = "the engine rounds, so it samples from another policy than the trainer's, and nothing corrects for it."
DEFAULT_ALGORITHM = {"sft": "sft", "offline": "fpa"}  # otherwise grpo


class Recipe(s.Section):
    trainer: Literal["rl", "sft", "offline", "generate"] = "rl"
    """rl: sample, grade, learn. sft: learn from given answers. generate: sample and grade once, into a store of
    trajectories. offline: learn from such a store."""
    run: s.Run
    model: s.Model
    megatron: s.Megatron = s.Megatron()
    optimizer: s.Optimizer = s.Optimizer()
    batching: s.Batching = s.Batching()
    data: s.Data
    rollout: s.Rollout = s.Rollout()
    vllm: Vllm = Vllm()
    reward: Reward = Reward()
    algorithm: Annotated[AnyAlgorithm, Field(discriminator="name")] = SFT()
    generation: o.Generation = o.Generation()
    critic: Critic | None = None
    """The value model of algorithm ppo."""
    pipo: PIPO | None = None
    """The plug-in that verifies each policy step by the change of the reward. null: without it."""
    constraint: c.Constraint | None = None
    """The constraint that keeps the policy from degenerating. null: the KL of the algorithm's options."""
    evaluation: s.Evaluation = s.Evaluation()
    checkpoint: s.Checkpoint = s.Checkpoint()
    tracking: s.Tracking = s.Tracking()
    faults: s.Faults = s.Faults()

    @property
    def longest_generation(self) -> int:
        """Tokens of the longest prompt and response that the engine generates."""
        sampled = self.evaluation.max_response_tokens or self.rollout.max_response_tokens
        if self.trainer in ("rl", "generate"):
            sampled = max(sampled, self.rollout.max_response_tokens)
        return self.data.max_prompt_tokens + sampled

    @property
    def longest_refinement(self) -> int:
        """Tokens of the refiner's longest prompt and response. The prompt is a question and a response in the template
        (a token is at least a byte) and chat markers; the response is the refined text."""
        template = len(self.constraint.template_text(self.reward.kind).encode()) + CHAT_MARKERS
        written = self.constraint.max_tokens or self.rollout.max_response_tokens
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens + template + written

    @property
    def refines(self) -> bool:
        return self.trainer == "rl" and self.constraint is not None and self.constraint.refines

    @property
    def validates(self) -> bool:
        """Whether the run evaluates during training; an offline run has the held-out problems of its store."""
        return self.evaluation.every > 0 if self.trainer == "offline" else self.data.validation is not None

    @model_validator(mode="before")
    @classmethod
    def _default_algorithm(cls, value: Any):
        """Set the trainer's default algorithm if none is named."""
        if not isinstance(value, dict) or not isinstance(given := value.get("algorithm") or {}, dict):
            return value
        if value.get("trainer") == "generate":
            return value
        if ":" in str(name := given.get("name")):
            raise at("algorithm.name", f"{name!r} is code: write name: own, objective: {name}")
        value = value | {"algorithm": {"name": DEFAULT_ALGORITHM.get(value.get("trainer"), "grpo")} | given}
        return c.into_algorithm(value)

    @model_validator(mode="after")
    def _check(self):
        for key in UNUSED[self.trainer]:
            if given(self, key):
                raise at(
                    key, f"does nothing with trainer {self.trainer}: leave it out, or set it to null to undo a base"
                )
        if self.algorithm.trainer != self.trainer and self.trainer != "generate":
            fits = {"sft": "sft", "offline": "an offline one, such as fpa", "rl": "an online algorithm, such as grpo"}
            raise at(
                "algorithm.name",
                f"'{self.algorithm.name}' does not belong to trainer {self.trainer}: that needs {fits[self.trainer]}",
            )
        self.reward.check_alone("reward.")
        if self.trainer == "rl":
            self._check_online()
        if self.trainer == "offline":
            self._check_offline()
        elif self.evaluation.patience:
            raise at("evaluation.patience", f"does nothing with trainer {self.trainer}: only offline runs stop early")
        if self.evaluation.every and not self.data.validation and self.trainer != "offline":
            raise at("evaluation.every", "does nothing without data.validation")
        if self.rollout.offload_trainer and self.trainer != "rl" and not (self.validates or self.data.test):
            raise at("rollout.offload_trainer", "does nothing without an engine, and nothing is evaluated")
        if self.trainer != "rl" and self.batching.differs("skip_zero_advantages"):
            raise at(
                "batching.skip_zero_advantages", f"does nothing with trainer {self.trainer}: there are no advantages"
            )
        self._check_mismatch()
        self._check_length()
        self._check_precision()
        return self

    def _check_online(self):
        algorithm = self.algorithm
        if self.constraint:
            self._check_constraint()
        measured = self.constraint and (self.constraint.refines or self.constraint.kl_every)
        if given(self, "model.reference") and not (measured or algorithm.uses_reference):
            raise at("model.reference", "does nothing without a KL to it: algorithm.kl_coefficient is 0 or missing")
        if not algorithm.of_user:  # training/user_algorithm.py checks a user's class
            self._check_critic()
        if self.critic and self.run.steps is not None and self.critic.warmup_steps >= self.run.steps:
            raise at(
                "critic.warmup_steps",
                f"{self.critic.warmup_steps} leaves the policy no step: the run has {self.run.steps}",
            )
        if not self.pipo:
            self._check_ratio()
        if self.rollout.staleness:
            self._check_staleness()
        if (rounding := self.vllm.rounding) and not self.corrects:
            raise at(f"vllm.{rounding}", f"{ROUNDED} {CORRECT}")
        for key in ("engine_start_s", "engine_silence_s"):
            if self.rollout.placement == "colocated" and self.faults.differs(key):
                raise at(f"faults.{key}", "does nothing with rollout.placement colocated")

    def _check_critic(self):
        name, needed = self.algorithm.name, self.algorithm.needs_critic
        if self.critic and not needed:
            raise at("critic", f"does nothing with algorithm {name}, which has no value model: set it to null")
        if needed and not self.critic:
            how = "Give at least critic.lr, e.g. 1e-5"
            raise at("critic", f"is missing: {name} trains a separate value model. {how}")

    @property
    def corrects(self) -> bool:
        """Whether the losses correct for responses sampled by another policy than the trained one. A loss without a
        ratio needs no correction, but PIPO's verification step has a ratio."""
        return self.algorithm.corrects_sampling or not (self.algorithm.has_ratio or self.pipo)

    @property
    def one_step(self) -> bool:
        """Whether a sampled batch gets one policy step."""
        prompts, algorithm = self.rollout.prompts_per_step, self.algorithm
        return (algorithm.mini_batch_prompts or prompts) == prompts and algorithm.epochs == 1

    @property
    def trains_while_sampling(self) -> bool:
        """Whether engines outside the ranks generate while the trainer works on earlier batches or on PIPO's
        verification."""
        return self.rollout.placement != "colocated" and (self.rollout.staleness > 0 or self.pipo is not None)

    def _check_constraint(self):
        constraint = self.constraint
        if not self.algorithm.takes_constraint:
            raise at("constraint", f"is for methods with rewards, and the loss of {self.algorithm.name} has none")
        if constraint.refines:
            constraint.template_text(self.reward.kind)
        if constraint.agreeing and not self.algorithm.leaves_groups_out:
            raise at(
                "constraint.agreeing", f"does nothing: with these options {self.algorithm.name} leaves no group out"
            )
        if constraint.first and constraint.first >= self.rollout.group_size:
            raise at("constraint.first", f"does nothing: rollout.group_size is {self.rollout.group_size}")

    def _check_staleness(self):
        stale = self.rollout.staleness
        if self.rollout.placement == "colocated":
            raise at(
                "rollout.staleness",
                f"{stale}: an engine in the rank's process cannot generate while the rank trains. Set "
                "rollout.placement to process or server",
            )
        if not self.corrects:
            raise at(
                "rollout.staleness",
                f"{stale}: responses come from older weights, and nothing corrects for it. {CORRECT}",
            )

    def _check_mismatch(self):
        """Refuse options of the train-inference mismatch if the run does not measure it."""
        why = None
        if self.trainer != "rl":
            why = f"trainer {self.trainer}"
        elif self.rollout.staleness:
            why = "rollout.staleness: responses come from older weights"
        elif self.algorithm.old_logprobs == "rollout":
            why = "algorithm.old_logprobs rollout: the trainer computes no log-probs to compare"
        elif self.algorithm.name == "sdpo" and not (self.one_step or self.algorithm.importance_cap or self.pipo):
            why = "several steps of sdpo for a batch without importance_cap: no pass comes before the first"
        for key in ("mismatch_kl", "mismatch_share", "mismatch_max", "on_mismatch"):
            if why and self.faults.differs(key):
                raise at(f"faults.{key}", f"does nothing with {why}")
        if self.faults.differs("compare_weights_every") and self.trainer != "rl":
            raise at("faults.compare_weights_every", f"does nothing with {why}")

    def _check_offline(self):
        if self.evaluation.patience and not self.evaluation.every:
            raise at("evaluation.patience", "does nothing while evaluation.every is 0")
        if self.data.validation and not self.evaluation.every:
            raise at("data.validation", "does nothing while evaluation.every is 0")
        for key in type(self.data.train).model_fields:
            if key != "path" and self.data.train.differs(key):
                raise at(
                    f"data.train.{key}", "does nothing with a store of trajectories: generate one with this option"
                )
        if self.data.limit:
            raise at(
                "data.limit", "does nothing with a store of trajectories: set data.validation.limit, data.test.limit"
            )
        for key in ("prompt_template", "chat", "chat_template_kwargs", "overlong", "prompt_field", "answer_field"):
            if self.data.differs(key) and not (self.data.test or self.data.validation):
                why = "does nothing without data.test or data.validation: the trajectories have their prompts"
                raise at(f"data.{key}", why)

    def _check_ratio(self):
        """Refuse options of the ratio and its clip if there is no ratio or it is always 1."""
        algorithm = self.algorithm
        on_policy = self.one_step and algorithm.old_logprobs == "recompute"
        clips = ("clip_low", "clip_high", "dual_clip")
        if algorithm.has_ratio:
            self._refuse(clips if on_policy else (), ON_POLICY)
            return
        weighted = algorithm.differs("importance_cap")
        self._refuse(("importance_cap",) if on_policy else (), ON_POLICY)
        why = f"does nothing without pipo: the loss of {algorithm.name} has no ratio"
        self._refuse(clips if weighted else (*clips, "old_logprobs"), why)

    def _refuse(self, keys: tuple[str, ...], why: str):
        for key in keys:
            if self.algorithm.differs(key):
                raise at(f"algorithm.{key}", why)

    def _check_length(self):
        if self.trainer == "rl" and self.run.steps is None:
            raise at("run.steps", "is required with trainer rl")
        if self.trainer in ("sft", "offline") and (self.run.steps is None) == (self.run.epochs is None):
            fix = ": set one of them to null" if self.run.steps else ""
            raise at("run.steps", f"trainer {self.trainer} needs either run.steps or run.epochs, and not both{fix}")

    def _check_precision(self):
        if self.model.precision == "fp8" and self.megatron.fp8_recipe == "delayed":
            raise at(
                "megatron.fp8_recipe",
                "Transformer Engine does not load the scales of `delayed` from a checkpoint, and would start with "
                "scales of 1: leave it out, or choose blockwise, mxfp8 or tensorwise",
            )
        own, optimizer = self.pipo is not None and self.pipo.optimizer_state == "own", self.optimizer.model_extra or {}
        for name in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
            if own and optimizer.get(name):
                raise at(
                    "pipo.optimizer_state",
                    f"own moments do not work with optimizer.{name}, which stores the weights' fp32 copies with the "
                    "moments: leave one of the two out",
                )
        if optimizer.get("optimizer_cpu_offload") and not (
            optimizer.get("use_precision_aware_optimizer") and self.model.precision != "fp32"
        ):
            raise at(
                "optimizer.optimizer_cpu_offload",
                "needs optimizer.use_precision_aware_optimizer=true and model.precision bf16 or fp8: otherwise "
                "megatron-core would not take the loaded weights over to the host, and step 1 would overwrite them",
            )
        if self.model.precision != "fp8":
            for name in sorted(self.megatron.model_fields_set | set(self.megatron.model_extra)):
                if name == "fp8" or name.startswith("fp8_"):
                    raise at(
                        f"megatron.{name}", f"does nothing with model.precision {self.model.precision}: set that to fp8"
                    )


def given(recipe: Recipe, key: str) -> bool:
    """Whether the recipe gives the dotted `key` a value other than null."""
    *sections, name = key.split(".")
    for section in sections:
        recipe = getattr(recipe, section)
    return name in recipe.model_fields_set and getattr(recipe, name) is not None
