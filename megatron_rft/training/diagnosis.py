"""Measures the mismatch between engine and trainer in an order that separates bugs from rounding.

In bf16 the trainer differs from itself, with other micro-batches, about as much as from the engine. So both sides first
compute in fp32: a difference above EXACT is a bug, and the hf engine tells the side. Without a bug, three further
numbers say whose rounding the mismatch is.
"""

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_rft.config import Recipe
from megatron_rft.conversion.lora import Merged
from megatron_rft.families.tables import EXPERT_BIAS
from megatron_rft.inference.engine import Request, request_seed
from megatron_rft.inference.weight_sync import load, send
from megatron_rft.megatron import parallel
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.surrogates import mismatch
from megatron_rft.records import Batch, Score
from megatron_rft.rollout.sampler import ScoredResponse, to_batch
from megatron_rft.training import adapters, build
from megatron_rft.training.engines import DTYPES, EngineBuilder
from megatron_rft.training.episodes import around
from megatron_rft.training.models import LOGPROBS
from megatron_rft.training.problems import Problems
from megatron_rft.utils.files import write_atomically

EXACT = 1e-6  # nats per token; two correct sides in fp32 were 5e-11 apart
FLOORS = 3  # a KL of up to this many times the trainer's from itself is its rounding
MEASURED = "measured.json"
ENGINE_IN_FP32 = ["rollout.dtype=fp32", "vllm.quantization=null", "vllm.kv_cache_dtype=null"]
HF_ENGINE = ["rollout.engine=hf", "rollout.placement=colocated", "rollout.processes=null", "vllm=null"]
Lookup = Callable[[str], Tensor]  # HF name -> tensor
Vary = Callable[..., Recipe]  # overrides -> the recipe with them


@dataclass
class Mismatch:
    """`lookup` has the weights; None: those that training starts from. All methods are collective."""

    vary: Vary
    lookup: Lookup | None
    count: int  # prompts
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self):
        self.recipe = recipe = self.vary()
        self.tokenizer, self.hf_config = build.load_model_files(recipe.model)
        self.prompts = Problems(recipe.data, recipe.environment).prompts("train", self.tokenizer).prompts[: self.count]
        self.trainer, self.kind = recipe.model.precision, EngineBuilder(recipe).kind(self.hf_config)
        rounds = recipe.vllm.rounding and f"with vllm.{recipe.vllm.rounding}"
        self.engine = rounds or recipe.rollout.dtype or ("fp32" if self.trainer == "fp32" else "bf16")
        fp8 = [name for name in recipe.megatron.model_fields_set if name.split("_")[0] == "fp8"]
        self.trainer_in_fp32 = ["model.precision=fp32", *(f"megatron.{name}=null" for name in fp8)]

    # ---- both sides

    def actor(self, *overrides: str) -> Actor:
        """The trainer's model without an optimizer. Its weights are those of the recipe's precision."""
        recipe, dtype = self.vary(*overrides), DTYPES[self.trainer]
        given = self.lookup or build.start_weights(recipe.model, recipe.run.seed, self.hf_config)
        lora = given.options if isinstance(given, Merged) else None if self.lookup else recipe.lora
        options = recipe.megatron, recipe.batching, recipe.model.precision
        actor = Actor(self.hf_config, *options, temperature=recipe.rollout.temperature, lora=lora)
        base = given
        if isinstance(given, Merged):  # the trainer computes with its adapters beside the frozen model
            base, trained = given.base, given.adapters
            actor.load(lambda name: trained(name).to(dtype), adapters=True)
        else:
            adapters.load_start(actor, recipe.model, recipe.run.seed)
        exact = tuple(EXPERT_BIAS.values())
        actor.load(lambda name: base(name) if name.endswith(exact) else base(name).to(dtype))
        return actor

    def sample(self, actor: Actor, *overrides: str) -> Batch:
        """Responses of an engine with the actor's weights, which had other weights before, as in a run.

        Raises:
            RunFailed: the engine's weights are not what was sent.
        """
        builder = EngineBuilder(recipe := self.vary(*overrides))
        sampling = build.build_sampling(recipe.rollout, self.tokenizer)
        with ExitStack() as stack:
            engine = builder.build(self.hf_config)
            player = around(engine, builder, self.tokenizer, stack)
            mine = self.requests(*engine.driver())
            load(((name, tensor.roll(1, -1) * 1.05) for name, tensor in actor.stream(dtype=engine.dtype)), engine, 1)
            list(engine.generate(mine, replace(sampling, max_tokens=1)))  # caches their prompts
            send(actor.stream(dtype=engine.dtype), engine, 2, verify=True)
            groups = list(player.generate(mine, sampling))
        found = [(group.id, number, each) for group in groups for number, each in enumerate(group.responses)]
        rollouts = [ScoredResponse(i, number, self.prompts[i], each, "", Score(0.0)) for i, number, each in found]
        return to_batch(sorted(parallel.gather(rollouts), key=lambda rollout: rollout.key))

    def requests(self, rank: int | None, world: int) -> list[Request]:
        size, seed = min(self.recipe.rollout.group_size, 8), self.recipe.run.seed
        asked = [(i, prompt) for i, prompt in enumerate(self.prompts) if rank is not None and i % world == rank]
        return [Request(i, tuple(p.token_ids), size, request_seed(seed, "diagnose", i), problem=p) for i, p in asked]

    def compare(self, name: str, actor: Actor, batch: Batch, own: Tensor | None = None) -> float:
        """The KL of the engine's log-probs, or the trainer's `own`, and the actor's, which becomes a row."""
        logprobs, one = actor.outputs(batch, LOGPROBS)["logprobs"], batch.tokens["rollout_logprobs"]
        found = mismatch(one if own is None else own, logprobs, batch.response_mask)
        self.rows.append({"name": name} | {key.removeprefix("mismatch/"): value for key, value in found.items()})
        return found["mismatch/kl"]

    # ---- the order

    def measure(self) -> dict[str, Any]:
        """The rows, and the sentence about a bug if there is one."""
        exact = self.actor(*self.trainer_in_fp32)
        batch = self.sample(exact, *ENGINE_IN_FP32)
        kl = self.compare("both in fp32", exact, batch)
        measured = {"rows": self.rows, "bug": None, "in_fp32": kl, "base": kl, "floor": 0.0}
        if kl >= EXACT:
            return measured | {"bug": self._side(exact)}
        if (self.trainer, self.engine) == ("fp32", "fp32"):
            return measured
        given = batch if self.engine == "fp32" else self.sample(exact)
        by_engine = self.compare(f"engine {self.engine}, trainer fp32", exact, given)
        actor = exact if self.trainer == "fp32" else self.actor()
        del exact
        by_trainer = self.compare(f"engine fp32, trainer {self.trainer}", actor, batch)
        base = self.compare(f"as in the recipe: engine {self.engine}, trainer {self.trainer}", actor, given)
        measured |= {"by_engine": by_engine, "by_trainer": by_trainer, "base": base}
        return measured | {"floor": self._floor(actor, given)}

    def _floor(self, actor: Actor, batch: Batch) -> float:
        """The trainer against itself, with one sequence in a micro-batch."""
        own, kept = actor.outputs(batch, LOGPROBS)["logprobs"], actor.forward_tokens
        actor.forward_tokens = int(batch.lengths.max())
        kl = self.compare("the floor: the trainer against itself, repacked", actor, batch, own)
        actor.forward_tokens = kept
        return kl

    def _side(self, actor: Actor) -> str:
        """Who computes something else in fp32."""
        if self.kind == "hf":
            return "the engine's model or the trainer's computes something else"
        other = self.sample(actor, "rollout.dtype=fp32", *HF_ENGINE)
        agree = self.compare("the hf engine instead, both in fp32", actor, other) < EXACT
        side = "vLLM" if agree else "the trainer"
        return f"{side} computes something else, or in another precision: the hf engine agrees with the other side only"


def run(vary: Vary, lookup: Lookup | None, count: int) -> None:
    """Measure on every rank. Rank 0 writes the result into the recipe's run.output_dir."""
    recipe = vary()
    parallel.initialize(recipe.megatron, seed=recipe.run.seed, faults=recipe.faults)
    try:
        result = Mismatch(vary, lookup, count).measure()
        if dist.get_rank() == 0:
            write_atomically(Path(recipe.run.output_dir) / MEASURED, json.dumps(result))
    finally:
        parallel.shutdown()
