"""Computes the seconds of a training step on GPUs, precisely enough to compare layouts. No torch.

Matrix products take a share of the device's FLOPs, and all other kernels the time of their memory traffic. Rehearsals
of an 8B model with torch's spec counted that traffic, for each byte that a layer keeps for its backward pass and for
each logit. Links take the time of their volume: rings, over NVLink inside a node. The result has two bounds, with all
links hidden behind kernels and with no overlap at all. Neither is a measurement.
"""

import math
from dataclasses import dataclass

from megatron_rft.plan.activations import kept
from megatron_rft.plan.devices import NODE, Device, Efficiency
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import State
from megatron_rft.plan.model_shape import ModelShape

TRAFFIC = 3.4, 7.7  # bytes that a layer's forward and backward pass move beside its products, per byte that it keeps
LOGIT_TRAFFIC = 56, 65  # bytes per logit, forward and backward
OPTIMIZER_TRAFFIC = 6.5  # bytes per byte of the optimizer's state
# FLOPs of experts' products, with the kernels around them, per byte of memory bandwidth. Fitted to one published run on
# H100, a quarter of its bf16 rate; on H20, with a seventh of the FLOPs, a published run has the rate of other products.
EXPERTS = 73.8


@dataclass(frozen=True)
class Bounds:
    """Seconds of kernels and of links."""

    kernels: float
    links: float

    def __add__(self, other: "Bounds") -> "Bounds":
        return Bounds(self.kernels + other.kernels, self.links + other.links)

    def __mul__(self, times: float) -> "Bounds":
        return Bounds(self.kernels * times, self.links * times)

    @property
    def least(self) -> float:
        return max(self.kernels, self.links)

    @property
    def most(self) -> float:
        return self.kernels + self.links


@dataclass(frozen=True)
class Machine:
    """A model laid out over devices and links. `sequence`: ranks that share a sequence between matrices."""

    chip: Device
    efficiency: Efficiency
    s: ModelShape
    layout: Layout
    sequence_parallel: bool
    recompute: str | None
    element: int = 2
    keys: float | None = None  # of shared prompts (shared_prompts.Group)

    @property
    def sequence(self) -> int:
        return self.layout.tp if self.sequence_parallel else 1

    def products(self, flops: float) -> float:
        return flops / self.chip.flops / self.efficiency.compute

    def traffic(self, size: float) -> float:
        return size / self.chip.bandwidth / self.efficiency.memory

    def ring(self, size: float, ranks: int, stride: int) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `size` bytes in total over ranks `stride` apart."""
        if ranks == 1:
            return 0.0
        inside = ranks * stride <= NODE
        together = max(1, min(ranks, NODE // stride))
        rate = self.chip.nvlink if inside else min(self.chip.nvlink, self.chip.network * together)
        return size * (ranks - 1) / ranks / rate / self.efficiency.link + self.efficiency.latency

    # ---- a micro-batch on the slowest stage

    def micro_batch(self, tokens: float, length: float, backward: bool) -> Bounds:
        """Return the time of `tokens` on a context-parallel rank, in sequences of `length` tokens on average, or in
        groups that share a prompt (shared_prompts.Group.length)."""
        layers = len(self.s.mixture) / self.layout.pp
        mean = sum((self._layer(tokens, length, m, backward) for m in self.s.mixture), Bounds(0, 0))
        total = mean * (layers / len(self.s.mixture)) + self._head(tokens, backward)
        if self.layout.pp > 1:
            size = tokens * self.s.hidden * self.element / self.sequence
            rate = self.chip.nvlink if self.layout.world <= NODE else self.chip.network
            across = size / rate / self.efficiency.link + self.efficiency.latency
            total += Bounds(0, across * (2 if backward else 1))
        return total

    def _layer(self, tokens: float, length: float, mixture: bool, backward: bool) -> Bounds:
        s, layout = self.s, self.layout
        wide = 3 * s.experts_per_token * s.expert_ffn / self.sequence if mixture else 3 * s.ffn / layout.tp
        if mixture:  # as if at the rate of the other products
            wide *= max(1, self.efficiency.compute * self.chip.flops / (EXPERTS * self.chip.bandwidth))
        attention = 2 * tokens * length * s.q / layout.tp
        flops = 2 * tokens * s.hidden * ((2 * s.q + 2 * s.kv) / layout.tp + wide)
        held = kept(s, layout, self.sequence, mixture, self.recompute, self.keys) * tokens * self.element
        seconds = self.products(flops + attention) + self.traffic(TRAFFIC[0] * held)
        forward = Bounds(seconds, self._links(tokens, mixture))
        if not backward:
            return forward
        again = {"full": forward, "selective": Bounds(self.products(attention), 0)}.get(self.recompute, Bounds(0, 0))
        gradients = Bounds(
            self.products(2 * flops + 2.5 * attention) + self.traffic(TRAFFIC[1] * held),
            1.5 * self._links(tokens, mixture),
        )
        return forward + gradients + again

    def _links(self, tokens: float, mixture: bool) -> float:
        """Return the seconds of the messages in a layer's forward pass."""
        s, layout, hidden = self.s, self.layout, tokens * self.s.hidden * self.element
        tensor = 4 * self.ring(hidden, layout.tp, 1)
        context = 2 * self.ring(tokens * layout.cp * s.kv / layout.tp * self.element, layout.cp, layout.tp)
        if not mixture:
            return tensor + context
        copies = hidden / self.sequence * s.experts_per_token
        near = min(layout.ep, max(1, NODE // layout.etp))  # ranks of a node among those that share the experts
        slow = (near - 1) / self.chip.nvlink + (layout.ep - near) / self.chip.network
        exchange = 2 * (copies * slow / layout.ep / self.efficiency.link + self.efficiency.latency)
        exchange *= layout.ep > 1
        return tensor / 2 + context + exchange + 2 * self.ring(copies * layout.etp, layout.etp, 1)

    def _head(self, tokens: float, backward: bool) -> Bounds:
        """Return the time of the last stage's output matrix and log-probs."""
        logits = tokens * self.s.vocabulary / self.layout.tp
        times, moved = (4, sum(LOGIT_TRAFFIC)) if backward else (1, LOGIT_TRAFFIC[0])
        return Bounds(self.products(2 * logits * self.s.hidden * times) + self.traffic(moved * logits), 0)

    # ---- a step

    def passes(self, tokens: float, budget: int, length: float, backward: bool) -> Bounds:
        """Return the time of the whole batch of `tokens`, in micro-batches of `budget` tokens, with the pipeline's
        bubble."""
        layout = self.layout
        count = max(1, math.ceil(tokens / (budget * layout.dp)))
        if layout.vpp:
            count = math.ceil(count / layout.pp) * layout.pp
        each = tokens / layout.dp / count / layout.cp
        bubble = 1 + (layout.pp - 1) / (layout.vpp or 1) / count
        return self.micro_batch(each, length, backward) * (count * bubble)

    def update(self, state: State) -> Bounds:
        """Return the time of the gradients' reduction, of Adam, and of gathering the weights."""
        layout = self.layout
        ranks, stride = layout.dp * layout.cp, layout.tp
        links = self.ring(state.gradients, ranks, stride) + self.ring(state.weights, ranks, stride)
        return Bounds(self.traffic(OPTIMIZER_TRAFFIC * state.optimizer), links)
