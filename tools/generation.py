"""Computes the seconds in which engines generate a step's responses, by a roofline of their decoding.

A decoding step reads the weights once for the whole batch, and the keys and values of each sequence. A group computes
its prompt once. The lower bound fills free places of the batch at once and launches kernels for free (CUDA graphs). The
upper bound starts a batch after the longest response of the batch before it, and launches each kernel.
"""

import math
from dataclasses import dataclass

from megatron_rft.plan.devices import Device, Efficiency
from megatron_rft.plan.model_shape import ModelShape

KERNELS = 12  # approximate number of a layer's kernels in a decoding step


@dataclass(frozen=True)
class EngineEstimate:
    """One engine over `devices`, with room for `places` sequences at a time. `element`: bytes of a number."""

    chip: Device
    efficiency: Efficiency
    s: ModelShape
    devices: int
    places: int
    element: int = 2

    @property
    def bandwidth(self) -> float:
        return self.chip.bandwidth * self.efficiency.memory * self.devices

    @property
    def flops(self) -> float:
        return self.chip.flops * self.efficiency.compute * self.devices

    @property
    def token(self) -> int:
        """The bytes of a token's keys and values on all devices, each of which has at least one head."""
        return 2 * max(self.s.kv, self.devices * self.s.head_dim) * len(self.s.mixture) * self.element

    def seconds(self, prompts: int, group: int, prompt: float, response: float, longest: float) -> tuple[float, float]:
        """Return the bounds (lower, upper) for `group` responses to each of `prompts`. `prompt` and `response` are mean
        lengths in tokens, `longest` is the limit of a response."""
        count = prompts * group
        batch = min(count, self.places)
        steps = max(longest, count * response / batch), math.ceil(count / batch) * longest
        cache = count * response * (prompt + response / 2) * self.token / self.bandwidth
        products = 2 * self.s.multiplied * (count * response + prompts * prompt) / self.flops
        weights = self.read(batch) * self.element / self.bandwidth
        launches = len(self.s.mixture) * KERNELS * self.efficiency.launch
        least = max(steps[0] * weights + cache, products)
        return least, steps[1] * (weights + launches) + cache + products

    def read(self, batch: int) -> float:
        """Return the number of parameters that a decoding step reads: only the experts that a token of the batch
        chooses."""
        s = self.s
        if not s.experts:
            return s.multiplied
        untouched = (1 - s.experts_per_token / s.experts) ** batch
        each = 3 * s.hidden * s.expert_ffn * sum(s.mixture)
        return s.multiplied + each * (s.experts * (1 - untouched) - s.experts_per_token)
