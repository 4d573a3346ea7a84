"""Computes the seconds in which engines generate a step's responses, by a roofline of their decoding. No torch.

A decoding step reads the weights once for the whole batch, and the keys and values of each sequence. A group computes
its prompt once. The lower bound fills free places of the batch at once and launches kernels for free (CUDA graphs). The
upper bound starts a batch after the longest response of the batch before it, and launches each kernel.

`tail` is one estimate. Lengths are lognormal with the given mean, and one response of a hundred reaches the limit, so
that a batch empties slowly: its last steps read all weights for a few sequences. That is what an engine on more devices
shortens, at the price of two sums over its devices in each layer. This roofline is divided by the share of it that
engines reach.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from megatron_rft.plan.devices import Device, Efficiency
from megatron_rft.plan.model_shape import ModelShape

KERNELS = 12  # approximate number of a layer's kernels in a decoding step
AT_LIMIT = 0.01  # share of responses that reach the limit
PARTS = 256  # of the longest response, in which the number of sequences is taken as constant
SUM = 10e-6  # seconds of a sum over an engine's devices: a few kilobytes over NVLink
# Share of this roofline that engines reached in whole steps of RL, with the host's work, sampling, uneven engines and
# all between the phases. Fitted to three published steps; docs/planning.md has three others to test it.
REACHED = 0.44
NORMAL = NormalDist()


def share_longer(tokens: float, mean: float, longest: float) -> float:
    """Return the share of responses with more than `tokens` tokens, lognormal with this mean."""
    if mean >= longest:
        return 1.0
    edge = NORMAL.inv_cdf(1 - AT_LIMIT)
    sigma = edge - math.sqrt(max(edge**2 - 2 * math.log(longest / mean), 0.0))
    return 1 - NORMAL.cdf((math.log(max(tokens, 1e-9) / mean) + sigma**2 / 2) / sigma)


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
        weights = self._read(batch) * self.element / self.bandwidth
        launches = len(self.s.mixture) * KERNELS * self.efficiency.launch
        least = max(steps[0] * weights + cache, products)
        return least, steps[1] * (weights + launches) + cache + products

    def tail(self, prompts: int, group: int, prompt: float, response: float, longest: float) -> float:
        """Return the seconds for `group` responses to each of `prompts`, with a tail of long responses."""
        count = prompts * group
        fixed = len(self.s.mixture) * (KERNELS * self.efficiency.launch + (2 * SUM if self.devices > 1 else 0))
        waves = math.ceil(count / self.places)
        width, total = longest / PARTS, 0.0
        for part in range(PARTS):
            done = (part + 0.5) * width
            alive = max(count / waves * share_longer(done, response, longest), 1.0)  # the longest response of all
            read = self._read(math.ceil(alive)) * self.element + alive * (prompt + done) * self.token
            total += width * (max(read / self.bandwidth, 2 * self.s.multiplied * alive / self.flops) + fixed)
        prefill = 2 * self.s.multiplied * prompts * prompt / self.flops
        return (waves * total + prefill) / REACHED

    def _read(self, batch: int) -> float:
        """Return the number of parameters that a decoding step reads: only the experts that a token of the batch
        chooses."""
        s = self.s
        if not s.experts:
            return s.multiplied
        untouched = (1 - s.experts_per_token / s.experts) ** batch
        each = 3 * s.hidden * s.expert_ffn * sum(s.mixture)
        return s.multiplied + each * (s.experts * (1 - untouched) - s.experts_per_token)
