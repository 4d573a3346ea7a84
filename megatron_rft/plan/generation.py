"""Seconds that engines need for a step's responses, by a roofline of their decoding. No torch.

Each token of a batch of responses reads the weights once and the keys and values of its own sequence; prompts are
computed once for each group. The least: free places of the batch are filled at once, and launches cost nothing (CUDA
graphs). The most: the next batch begins when the longest response of the last has ended, and each kernel is launched.
"""

import math
from dataclasses import dataclass

from megatron_rft.plan.devices import Device, Efficiency
from megatron_rft.plan.parameters import Sizes

KERNELS = 12  # of a layer at a decoding step, about


@dataclass(frozen=True)
class Engine:
    """One engine over `devices`, with room for `places` sequences at a time. `element`: bytes of a number."""

    chip: Device
    efficiency: Efficiency
    s: Sizes
    devices: int
    places: int
    element: int = 2

    def seconds(self, prompts: int, group: int, prompt: float, response: float, longest: float) -> tuple[float, float]:
        """(least, most) for `group` responses to each of `prompts`; lengths in tokens, `longest` of a response."""
        count = prompts * group
        batch = min(count, self.places)
        steps = max(longest, count * response / batch), math.ceil(count / batch) * longest
        e = self.efficiency
        bandwidth = self.chip.bandwidth * e.memory * self.devices
        per_token = 2 * self.s.kv * len(self.s.mixture) * self.element
        cache = count * response * (prompt + response / 2) * per_token / bandwidth
        flops = self.chip.flops * e.compute * self.devices
        products = 2 * self.s.multiplied * (count * response + prompts * prompt) / flops
        weights = self._read(batch) * self.element / bandwidth
        launches = len(self.s.mixture) * KERNELS * e.launch
        least = max(steps[0] * weights + cache, products)
        return least, steps[1] * (weights + launches) + cache + products

    def _read(self, batch: int) -> float:
        """Parameters that a decoding step reads: of a mixture those experts that one of the batch's tokens chooses."""
        s = self.s
        if not s.experts:
            return s.multiplied
        untouched = (1 - s.experts_per_token / s.experts) ** batch
        each = 3 * s.hidden * s.expert_ffn * sum(s.mixture)
        return s.multiplied + each * (s.experts * (1 - untouched) - s.experts_per_token)
