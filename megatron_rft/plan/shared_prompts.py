"""Counts the tokens of a group of responses that share a prompt (docs/shared_prompts.md). No torch."""

import math
from dataclasses import dataclass

from megatron_rft.config.recipe import Recipe
from megatron_rft.config.sections import Batching
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.model_shape import ModelShape


@dataclass(frozen=True)
class SharedGroup:
    """`count` responses of `response` tokens behind one prompt. `count` is 1 if prompts are not shared."""

    prompt: float
    response: float
    count: int

    @classmethod
    def of(cls, recipe: Recipe, s: ModelShape, layout: Layout, fraction: float = 1) -> "SharedGroup":
        """Return as many of a group's responses as fit into a micro-batch behind one prompt. An offline problem has at
        least two. `fraction`: mean length of prompts and responses, as a share of the longest."""
        prompt = recipe.data.max_prompt_tokens * fraction
        response = recipe.rollout.max_response_tokens * fraction
        group = {"rl": recipe.rollout.group_size, "offline": 2}.get(recipe.trainer, 1)
        room = int((recipe.batching.micro_batch_tokens - prompt) / response)
        alone = recipe.batching.why_not_shared(layout.cp, s.whole_sequences)
        return cls(prompt, response, 1 if alone else max(1, min(group, room)))

    def fill(self, batching: Batching, sequences: int) -> Batching:
        """Return `batching` with micro-batches no larger than the `sequences` of a rank."""
        own = math.ceil(math.ceil(sequences / self.count) * self.tokens)
        return batching.model_copy(update={"micro_batch_tokens": min(batching.micro_batch_tokens, own)})

    @property
    def tokens(self) -> float:
        return self.prompt + self.count * self.response

    @property
    def keys(self) -> float | None:
        """Keys per token that attention gathers; None if it gathers none."""
        return self.count * (self.prompt + self.response) / self.tokens if self.count > 1 else None

    @property
    def length(self) -> float:
        """Length of an ordinary sequence in which a token attends to as many others on average."""
        pairs = self.prompt**2 + self.count * (2 * self.prompt * self.response + self.response**2)
        return pairs / self.tokens
