"""Builds the refiner of a dynamic constraint, and shows what it changes."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch

from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import request_seed
from megatron_rft.megatron.actor import Actor
from megatron_rft.records import Batch, Prompt
from megatron_rft.rollout.refiner import Refiner
from megatron_rft.rollout.sampler import ScoredResponse
from megatron_rft.tracking.metrics import Sample
from megatron_rft.training import build
from megatron_rft.training.engines import EngineBuilder
from megatron_rft.training.models import LOGPROBS, Models

REFINER_STREAM = 1  # a stream of sampling seeds other than the policy's
PAIRS = 2  # shown of a step


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
    options, hf_config = engines.recipe.constraint, models.actor.hf_config
    engine = stack.enter_context(closing(engines.build_refining(hf_config)))
    with models.actor.use_weights(models.reference):
        weight_sync.send(models.actor.stream(dtype=engine.dtype), engine, version=0, verify=True)
    return Refiner(
        engine,
        build.build_sampling(engines.recipe.rollout, tokenizer, options.max_tokens, options.temperature),
        tokenizer,
        encode,
        template,
        maximum,
        partial(request_seed, seed, REFINER_STREAM),
        options,
        engines.longest_refinement(hf_config),
    )


def shown_pairs(rollouts: list[ScoredResponse], actor: Actor, tokenizer: Any) -> list[Sample]:
    """The first pairs that are trained on, each a response a and its refinement a', with -log pi of each token given
    the tokens before it, in nats, by the policy that wrote the response. Tokens of a' beyond |a| are not part of the
    constraint and are left out. Collective; call it before the step's updates."""
    chosen = [each for each in rollouts if each.refined and each.refined.kept][:PAIRS]
    if not chosen:
        return []
    written = [list(each.response.token_ids) for each in chosen]
    refined = [list(each.refined.token_ids[: len(ids)]) for each, ids in zip(chosen, written, strict=True)]
    keys = {"images": torch.tensor([each.prompt.images_key for each in chosen] * 2)}
    batch = Batch.of([list(each.prompt.token_ids) for each in chosen] * 2, written + refined, sequences=keys)
    values = (-actor.outputs(batch, LOGPROBS)["logprobs"]).split(batch.response_lens.tolist())

    def sample(number: int, kind: str, reward: float) -> Sample:
        ids, prompt = (written + refined)[number], chosen[number % len(chosen)].prompt
        tokens, entropies = [tokenizer.decode([token]) for token in ids], {"cross_entropy": values[number].tolist()}
        return Sample(prompt.text, tokens, reward, entropies, problem=prompt.index, kind=kind)

    sides = [
        (sample(i, "to be refined", each.score.reward), sample(len(chosen) + i, "refined", each.refined.score.reward))
        for i, each in enumerate(chosen)
    ]
    return [side for pair in sides for side in pair]
