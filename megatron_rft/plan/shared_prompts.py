"""Counts the tokens of a group of responses that share a prompt (docs/shared_prompts.md). No torch."""

import math
from dataclasses import dataclass

from megatron_rft.config.sections import Batching, Data, Rollout


@dataclass(frozen=True)
class SharedGroup:
    """`count` responses of `response` tokens behind one prompt. `count` is 1 if prompts are not shared."""

    prompt: float
    response: float
    count: int

    @classmethod
    def of(
        cls,
        trainer: str,
        batching: Batching,
        data: Data,
        rollout: Rollout,
        cp: int,
        fraction: float = 1,
        why_not: str = "",
    ) -> "SharedGroup":
        """Return as many of a group's responses as fit into a micro-batch behind one prompt. An offline problem has at
        least two. `why_not`: the model's reason why they do not share it. `fraction`: mean length of prompts and
        responses, as a share of the longest."""
        prompt, response = data.max_prompt_tokens * fraction, rollout.max_response_tokens * fraction
        group = {"rl": rollout.group_size, "offline": 2}.get(trainer, 1)
        room = int((batching.micro_batch_tokens - prompt) / response)
        return cls(prompt, response, 1 if batching.why_not_shared(cp, why_not) else max(1, min(group, room)))

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
