"""Computes the seconds in which engines generate a step's responses, by a roofline of their decoding. No torch.

A decoding step reads the weights once for the whole batch, and the keys and values of each sequence. A group computes
its prompt once. The lower bound fills free places of the batch at once and launches kernels for free (CUDA graphs). The
upper bound starts a batch after the longest response of the batch before it, and launches each kernel.
"""

import math
from dataclasses import dataclass

from megatron_rft.plan.devices import Device, Efficiency
from megatron_rft.plan.parameters import Sizes

KERNELS = 12  # approximate number of a layer's kernels in a decoding step


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
        """Return the bounds (lower, upper) for `group` responses to each of `prompts`. `prompt` and `response` are mean
        lengths in tokens, `longest` is the limit of a response."""
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
        """Return the number of parameters that a decoding step reads: only the experts that a token of the batch
        chooses."""
        s = self.s
        if not s.experts:
            return s.multiplied
        untouched = (1 - s.experts_per_token / s.experts) ** batch
        each = 3 * s.hidden * s.expert_ffn * sum(s.mixture)
        return s.multiplied + each * (s.experts * (1 - untouched) - s.experts_per_token)
