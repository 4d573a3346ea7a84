"""Builds the refiner of a dynamic constraint, and writes examples for the report."""

import json
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_rft.config.constraint import DynamicOptions
from megatron_rft.inference.engine import request_seed
from megatron_rft.megatron.actor import Actor
from megatron_rft.records import Batch, Prompt
from megatron_rft.rollout.refiner import Refiner
from megatron_rft.rollout.sampler import ScoredResponse
from megatron_rft.tracking.metrics import drop_from
from megatron_rft.training import build
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.training.models import LOGPROBS, Models
from megatron_rft.training.monitor import due

REFINER_STREAM = 1  # a stream of sampling seeds other than the policy's
EXAMPLES_FILE = "refinements.jsonl"


def build_refiner(
    engines: EngineBuilder,
    models: Models,
    tokenizer: Any,
    encode: Callable[[Prompt, str], list[int]],
    template: str,
    maximum: float,
    seed: int,
    stack: ExitStack,
) -> Refiner:
    """`encode`, `template`, `maximum`: as of `Refiner`. Its engine has the reference's weights, which never change. It
    is always in this process: recovery of engines in other processes is collective, but each rank uses its refiner at
    different times."""
    options, hf_config = engines.constraint, models.actor.hf_config
    engine = stack.enter_context(closing(engines.build_refining(hf_config)))
    models.send_reference(engine)
    return Refiner(
        engine,
        build.build_sampling(engines.rollout, tokenizer, options.max_tokens, options.temperature),
        tokenizer,
        encode,
        template,
        maximum,
        partial(request_seed, seed, REFINER_STREAM),
        options,
        engines.longest_refinement_of(hf_config),
    )


class Examples:
    """RUN/refinements.jsonl: a line per step with examples, {"step": 10, "examples": [example, ...]}, where an
    example is

        {"problem": 17, "prompt": "...", "response": "...", "refined": "...", "reward": -0.3, "refined_reward": 1.0,
         "response_tokens": ["3", " (1) ", ...], "response_cross_entropy": [0.1, 0.0, ...],
         "refined_tokens": ["3", " (1) ", ...], "refined_cross_entropy": [0.1, 0.0, ...]}

    where the cross-entropy of a token is -log pi given the tokens before it, in nats, by the policy that wrote the
    response. Tokens of a' beyond |a| are not part of the constraint and are left out.
    """

    def __init__(self, options: DynamicOptions, folder: Path, actor: Actor, tokenizer: Any):
        self.options, self.actor, self.tokenizer, self.is_main = options, actor, tokenizer, dist.get_rank() == 0
        self.path = folder / EXAMPLES_FILE

    def resume(self, done: int) -> None:
        """Remove the lines that an earlier start wrote for steps after `done`."""
        if self.is_main and self.path.exists():
            drop_from(self.path, done + 1)

    def write(self, step: int, rollouts: list[ScoredResponse]) -> None:
        """Write the first pairs that are trained on. Collective; call it before the step's updates."""
        pairs = [each for each in rollouts if each.refined and each.refined.kept]
        chosen = pairs[: self.options.examples]
        if not due(self.options.examples_every, step) or not chosen:
            return
        refined = [list(each.refined.token_ids[: len(each.response.token_ids)]) for each in chosen]
        written = [list(each.response.token_ids) for each in chosen]
        prompts = [list(each.prompt.token_ids) for each in chosen]
        batch = Batch.of(prompts * 2, written + refined)
        values = (-self.actor.outputs(batch, LOGPROBS)["logprobs"]).split(batch.response_lens.tolist())
        if not self.is_main:
            return
        examples = [
            {
                "problem": each.prompt.index,
                "prompt": each.prompt.text,
                "response": each.text,
                "refined": each.refined.text,
                "reward": each.score.reward,
                "refined_reward": each.refined.score.reward,
                **self._side("response", written[i], values[i]),
                **self._side("refined", refined[i], values[len(chosen) + i]),
            }
            for i, each in enumerate(chosen)
        ]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "examples": examples}) + "\n")

    def _side(self, name: str, ids: list[int], values: torch.Tensor) -> dict[str, list]:
        return {
            f"{name}_tokens": [self.tokenizer.decode([token]) for token in ids],
            f"{name}_cross_entropy": [round(value, 4) for value in values.tolist()],
        }
