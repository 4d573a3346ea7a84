"""Seconds of a training step on GPUs, by arithmetic: enough to compare layouts. No torch.

Kernels by a roofline: matrix products at a share of the device's FLOPs, everything else by its traffic in memory. The
traffic of torch's spec was counted by rehearsals of an 8B model (`megatron-rft rehearse`), in units of what a layer
keeps for its backward pass, and of logits. Links by volume: rings, inside a node over NVLink. Between all links behind
kernels and no overlap at all lie two bounds; neither is a measurement.
"""

import math
from dataclasses import dataclass

from megatron_rft.plan.activations import kept
from megatron_rft.plan.devices import NODE, Device, Efficiency
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import State
from megatron_rft.plan.parameters import Sizes

TRAFFIC = 3.4, 7.7  # bytes that a layer's forward and backward move beside its products, for each byte that it keeps
LOGIT_TRAFFIC = 56, 65  # bytes for each logit, forward and backward
OPTIMIZER_TRAFFIC = 6.5  # bytes for each byte of the optimizer's state
EXPERTS = 0.25  # of the bf16 rate, by products of small experts and what surrounds them: fitted to one published run
FUSED = 0.4  # of this traffic, with Transformer Engine's kernels: an assumption


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
    """Devices, links, and a model laid out over them. `sequence`: ranks that share a sequence between matrices."""

    chip: Device
    efficiency: Efficiency
    s: Sizes
    layout: Layout
    sequence_parallel: bool
    recompute: str | None
    element: int = 2
    fused: bool = False
    node: int = NODE
    keys: float | None = None  # of shared prompts (shared_prompts.Group)
    experts: float = EXPERTS

    @property
    def sequence(self) -> int:
        return self.layout.tp if self.sequence_parallel else 1

    def products(self, flops: float) -> float:
        return flops / self.chip.flops / self.efficiency.compute

    def traffic(self, size: float) -> float:
        return size * (FUSED if self.fused else 1) / self.chip.bandwidth / self.efficiency.memory

    def ring(self, size: float, ranks: int, stride: int) -> float:
        """All-gather or reduce-scatter of `size` bytes in all, over ranks that are `stride` apart."""
        if ranks == 1:
            return 0.0
        inside = ranks * stride <= self.node
        together = max(1, min(ranks, self.node // stride))
        rate = self.chip.nvlink if inside else min(self.chip.nvlink, self.chip.network * together)
        return size * (ranks - 1) / ranks / rate / self.efficiency.link + self.efficiency.latency

    # ---- a micro-batch on the slowest stage

    def micro_batch(self, tokens: float, length: float, backward: bool) -> Bounds:
        """`tokens` of a context-parallel rank, in sequences of `length` tokens on average, or in groups that share a
        prompt (shared_prompts.Group.length)."""
        layers = len(self.s.mixture) / self.layout.pp
        mean = sum((self._layer(tokens, length, m, backward) for m in self.s.mixture), Bounds(0, 0))
        found = mean * (layers / len(self.s.mixture)) + self._head(tokens, backward)
        if self.layout.pp > 1:
            size = tokens * self.s.hidden * self.element / self.sequence
            rate = self.chip.nvlink if self.layout.world <= self.node else self.chip.network
            across = size / rate / self.efficiency.link + self.efficiency.latency
            found += Bounds(0, across * (2 if backward else 1))
        return found

    def _layer(self, tokens: float, length: float, mixture: bool, backward: bool) -> Bounds:
        s, layout = self.s, self.layout
        wide = 3 * s.experts_per_token * s.expert_ffn / self.sequence if mixture else 3 * s.ffn / layout.tp
        wide *= self.efficiency.compute / self.experts if mixture else 1  # as if at the rate of the other products
        attention = 2 * tokens * length * s.q / layout.tp
        flops = 2 * tokens * s.hidden * ((2 * s.q + 2 * s.kv) / layout.tp + wide)
        held = kept(s, layout, self.sequence, mixture, self.recompute, self.keys) * tokens * self.element
        forward = Bounds(
            self.products(flops + attention) + self.traffic(TRAFFIC[0] * held), self._links(tokens, mixture)
        )
        if not backward:
            return forward
        again = {"full": forward, "selective": Bounds(self.products(attention), 0)}.get(self.recompute, Bounds(0, 0))
        gradients = Bounds(
            self.products(2 * flops + 2.5 * attention) + self.traffic(TRAFFIC[1] * held),
            1.5 * self._links(tokens, mixture),
        )
        return forward + gradients + again

    def _links(self, tokens: float, mixture: bool) -> float:
        """Of a layer's forward pass."""
        s, layout, hidden = self.s, self.layout, tokens * self.s.hidden * self.element
        tensor = 4 * self.ring(hidden, layout.tp, 1)
        context = 2 * self.ring(tokens * layout.cp * s.kv / layout.tp * self.element, layout.cp, layout.tp)
        if not mixture:
            return tensor + context
        copies = hidden / self.sequence * s.experts_per_token
        span = layout.ep * layout.etp
        rate = self.chip.nvlink if span <= self.node else self.chip.network
        share = (layout.ep - 1) / layout.ep
        exchange = 2 * (copies * share / rate / self.efficiency.link + self.efficiency.latency) if layout.ep > 1 else 0
        return tensor / 2 + context + exchange + 2 * self.ring(copies * layout.etp, layout.etp, 1)

    def _head(self, tokens: float, backward: bool) -> Bounds:
        """Of the last stage: the output matrix and the log-probs."""
        logits = tokens * self.s.vocabulary / self.layout.tp
        times, moved = (4, sum(LOGIT_TRAFFIC)) if backward else (1, LOGIT_TRAFFIC[0])
        return Bounds(self.products(2 * logits * self.s.hidden * times) + self.traffic(moved * logits), 0)

    # ---- a step

    def passes(self, tokens: float, budget: int, length: float, backward: bool) -> Bounds:
        """`tokens` of the whole batch, in micro-batches of `budget` tokens, with the pipeline's bubble."""
        layout = self.layout
        count = max(1, math.ceil(tokens / (budget * layout.dp)))
        if layout.vpp:
            count = math.ceil(count / layout.pp) * layout.pp
        each = tokens / layout.dp / count / layout.cp
        bubble = 1 + (layout.pp - 1) / (layout.vpp or 1) / count
        return self.micro_batch(each, length, backward) * (count * bubble)

    def update(self, state: State) -> Bounds:
        """Gradients to their owners, Adam, weights back."""
        layout = self.layout
        ranks, stride = layout.dp * layout.cp, layout.tp
        links = self.ring(state.gradients, ranks, stride) + self.ring(state.weights, ranks, stride)
        return Bounds(self.traffic(OPTIMIZER_TRAFFIC * state.optimizer), links)
