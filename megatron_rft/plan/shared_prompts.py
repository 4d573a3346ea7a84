"""What a group of responses behind one shared prompt takes, in tokens. Plain arithmetic (docs/shared_prompts.md)."""

import math
from dataclasses import dataclass

from megatron_rft.config.sections import Batching, Data, Rollout


@dataclass(frozen=True)
class Group:
    """`count` responses of `response` tokens that are computed behind one prompt; 1 where prompts are not shared."""

    prompt: float
    response: float
    count: int

    @classmethod
    def of(
        cls, trainer: str, batching: Batching, data: Data, rollout: Rollout, cp: int, fraction: float = 1
    ) -> "Group":
        """As many of a group's responses as fit into a micro-batch behind one prompt. An offline problem has two at
        least. `fraction`: mean length of prompts and responses, of the longest."""
        prompt, response = data.max_prompt_tokens * fraction, rollout.max_response_tokens * fraction
        group = {"rl": rollout.group_size, "offline": 2}.get(trainer, 1)
        room = int((batching.micro_batch_tokens - prompt) / response)
        return cls(prompt, response, 1 if batching.why_not_shared(cp) else max(1, min(group, room)))

    def fill(self, batching: Batching, sequences: int) -> Batching:
        """With micro-batches no larger than the `sequences` of a rank."""
        own = math.ceil(math.ceil(sequences / self.count) * self.tokens)
        return batching.model_copy(update={"micro_batch_tokens": min(batching.micro_batch_tokens, own)})

    @property
    def tokens(self) -> float:
        return self.prompt + self.count * self.response

    @property
    def keys(self) -> float | None:
        """Keys that attention gathers, for each token; None where it gathers none."""
        return self.count * (self.prompt + self.response) / self.tokens if self.count > 1 else None

    @property
    def length(self) -> float:
        """Length of an ordinary sequence of which a token attends to as many others on average."""
        pairs = self.prompt**2 + self.count * (2 * self.prompt * self.response + self.response**2)
        return pairs / self.tokens
