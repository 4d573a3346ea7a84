"""A whole recipe: its sections, and the checks across sections that hold for every trainer. No torch."""

from typing import Annotated, Any, ClassVar

from pydantic import model_validator

from megatron_rft.config import environment as environments
from megatron_rft.config import sections as s
from megatron_rft.config.algorithms import SECTIONS
from megatron_rft.config.algorithms.base import Algorithm
from megatron_rft.config.algorithms.online import DEFAULT, Critic, Setting
from megatron_rft.config.constraint import CONSTRAINTS, Constraint, DynamicOptions
from megatron_rft.config.evaluation import Evaluation
from megatron_rft.config.lora import Lora
from megatron_rft.config.messages import at
from megatron_rft.config.one_of import OneOf
from megatron_rft.config.plugins import PIPO, Distil, Teaching
from megatron_rft.config.rewards import AnyReward, MathOptions
from megatron_rft.config.vllm import Vllm

CHAT_MARKERS = 128  # an upper bound of a chat template's tokens around one turn, with a system prompt
FITS = {"sft": "sft", "offline": "an offline one, such as fpa", "rl": "an online algorithm, such as grpo"}


class Recipe(s.Section):
    """What the code that all trainers share reads. `trainers.py` has the recipes that can be written: there a trainer's
    recipe lacks the options that would do nothing with it."""

    corrects: ClassVar[bool] = True  # the losses correct for responses of a policy other than the trained one, if any
    setting: ClassVar[Setting] = DEFAULT
    trainer: str
    """rl: sample, grade, learn. sft: learn from given answers. generate: sample and grade once, into a store of
    trajectories. offline: learn from such a store."""
    run: s.Run
    model: s.Model
    lora: Lora | None = None
    """Train adapters of the frozen model instead of the model. null: train the model."""
    megatron: s.Megatron = s.Megatron()
    optimizer: s.Optimizer = s.Optimizer()
    batching: s.Batching = s.Batching()
    data: s.Data
    rollout: s.Rollout = s.Rollout()
    vllm: Vllm = Vllm()
    reward: AnyReward = MathOptions()
    environment: Annotated[environments.Base, OneOf("kind", environments.ENVIRONMENTS)] | None = None
    """What answers the policy between its turns, such as tools (docs/agents.md). null: a response is one turn."""
    algorithm: Algorithm
    critic: Critic | None = None
    """The value model of algorithm ppo."""
    distil: Distil | None = None
    """The plug-in that adds the divergence from a teacher to the loss. null: without it."""
    pipo: PIPO | None = None
    """The plug-in that verifies each policy step by the change of the reward. null: without it."""
    constraint: Annotated[Constraint, OneOf("kind", CONSTRAINTS)] | None = None
    """The constraint that keeps the policy from degenerating. null: the KL of the algorithm's options."""
    evaluation: Evaluation = Evaluation()
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
        assert isinstance(self.constraint, DynamicOptions)
        template = len(self.constraint.template_text(self.reward.kind).encode()) + CHAT_MARKERS
        written = self.constraint.max_tokens or self.rollout.max_response_tokens
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens + template + written

    @property
    def refines(self) -> bool:
        return self.constraint is not None and self.constraint.refines

    @property
    def validates(self) -> bool:
        """Whether the run evaluates during training."""
        return self.data.validation is not None

    @property
    def teaching(self) -> Teaching | None:
        """The options of a distillation's teacher."""
        return self.distil or (self.algorithm if isinstance(self.algorithm, Teaching) else None)

    @property
    def models(self) -> dict[str, str]:
        """The folders or hub names of the models that each start of a run reads, by option."""
        model, critic, teachers = self.model, self.critic, self.teaching.teachers if self.teaching else {}
        given = {"model.path": model.path, "model.reference": model.reference, "critic.path": critic and critic.path}
        given |= {f"teacher {name}".strip(): path for name, path in teachers.items()}
        return {option: path for option, path in given.items() if path}

    @property
    def trains_while_sampling(self) -> bool:
        """Whether engines outside the ranks generate while the trainer works on earlier batches or on PIPO's
        verification."""
        return self.rollout.placement != "colocated" and (self.rollout.staleness > 0 or self.pipo is not None)

    @property
    def vision(self) -> str:
        """Whether a vision tower is frozen, trained, or has adapters."""
        return "with adapters" if self.lora and "vision" in self.lora.targets else self.model.vision

    @model_validator(mode="before")
    @classmethod
    def _algorithm_of_this_trainer(cls, value: Any):
        algorithm = value.get("algorithm") if isinstance(value, dict) else None
        name = str(algorithm.get("name")) if isinstance(algorithm, dict) else ""
        if ":" in name:
            raise at("algorithm.name", f"{name!r} is code: write name: own, objective: {name}")
        trainer = cls.model_fields["trainer"].default
        if trainer in FITS and name in SECTIONS and SECTIONS[name].trainer != trainer:
            raise at("algorithm.name", f"'{name}' does not belong to trainer {trainer}: that needs {FITS[trainer]}")
        return value

    def _check(self):
        self.reward.check_alone("reward.")
        self.evaluation.unused(not self.validates, "without data.validation", "every", place="evaluation.")
        greedy = not (self.evaluation.temperature or self.environment)
        why = "at evaluation.temperature 0: all completions of a problem are equal"
        self.evaluation.unused(greedy, why, "samples", place="evaluation.")
        why = "with reward.kind none: nothing grades the responses"
        self.data.unused(self.reward.kind == "none", why, "validation", "test", place="data.")
        self.evaluation.unused(self.reward.kind == "none", why, "every", place="evaluation.")
        if self.environment:
            self._check_environment(self.environment)
        several = self.teaching is not None and isinstance(self.teaching.teacher, dict)
        if several != (self.data.teacher_field is not None):
            why = "is missing: it says which of the teachers a row has" if several else "does nothing with one teacher"
            raise at("data.teacher_field", f"{why} (teacher: {{name: path, ...}})")
        if self.lora and self.model.vision == "trained":
            raise at("model.vision", "trained does not work with lora: leave it out, or add vision to lora.targets")
        self._check_precision()

    def _check_environment(self, environment: environments.Base):
        turn, longest = environment.turn_tokens, self.rollout.max_response_tokens
        if turn and turn >= longest:
            why = f"{turn} does nothing: rollout.max_response_tokens, {longest}, limits the whole episode"
            raise at("environment.turn_tokens", why)
        if self.refines:
            why = "a refined response would have the environment's answers to another response. Set constraint to null"
            raise at("environment", f"does not work with a dynamic constraint: {why}")
        if not (self.trainer in ("rl", "generate") or self.validates or self.data.test):
            raise at("environment", "does nothing: this run samples no responses")

    def _check_precision(self):
        if self.model.precision == "fp8" and self.megatron.fp8_recipe == "delayed":
            raise at(
                "megatron.fp8_recipe",
                "Transformer Engine does not load the scales of `delayed` from a checkpoint, and would start with "
                "scales of 1: leave it out, or choose blockwise, mxfp8 or tensorwise",
            )
        own, optimizer = self.pipo is not None and self.pipo.optimizer_state == "own", self.optimizer.extra
        aware, offloads = map(optimizer.get, ("use_precision_aware_optimizer", "optimizer_cpu_offload"))
        if own and (aware or offloads):  # the latter needs the former
            why = "which stores the weights' fp32 copies with the moments: leave one of the two out"
            raise at("pipo.optimizer_state", f"own moments do not work with use_precision_aware_optimizer, {why}")
        if offloads and not (aware and self.model.precision != "fp32"):
            raise at(
                "optimizer.optimizer_cpu_offload",
                "needs optimizer.use_precision_aware_optimizer=true and model.precision bf16 or fp8: otherwise "
                "megatron-core would not take the loaded weights over to the host, and step 1 would overwrite them",
            )
        if offloads and not optimizer.get("optimizer_offload_fraction"):
            raise at("optimizer.optimizer_cpu_offload", "does nothing without optimizer_offload_fraction; 1.0 is all")
        its = ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d", "pin_cpu_grads", "pin_cpu_params")
        self.optimizer.unused(not offloads, "without optimizer_cpu_offload", *its, place="optimizer.")
        starts = ("fp8", "first_last_layers", "num_layers_at", "tp_only_amax")
        fp8 = [name for name in self.megatron.extra if name.startswith(starts)]
        why = f"with model.precision {self.model.precision}: set that to fp8"
        self.megatron.unused(self.model.precision != "fp8", why, *fp8, "fp8", "fp8_recipe", place="megatron.")
