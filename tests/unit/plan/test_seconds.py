"""Estimated seconds: against published H100 runs, against a rehearsal, and relations between layouts."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_rft.config import load
from megatron_rft.plan.devices import Efficiency, device
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import State
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.parameters import stage_chunks
from megatron_rft.plan.seconds import Bounds, Machine
from tests.shapes import json_of
from tools.generation import EngineEstimate

ROOT = Path(__file__).resolve().parents[3]


def dense(hidden, layers, heads, ffn, vocabulary=128_256, qk_norm=False):
    kind = "qwen3" if qk_norm else "llama"
    return ModelShape(json_of(layers, hidden, heads, 8, ffn, vocabulary, 128, model_type=kind))


LLAMA_8B, LLAMA_70B = dense(4096, 32, 32, 14_336), dense(8192, 80, 64, 28_672)
LLAMA_405B = dense(16_384, 128, 128, 53_248)  # it has 126 layers, which no pipeline of 8 or 16 divides
QWEN3_32B = dense(5120, 64, 64, 25_600, 151_936, qk_norm=True)
MIXTURE = dict(model_type="qwen3_moe", num_experts=128, moe_intermediate_size=768, num_experts_per_tok=8)
QWEN3_30B_A3B = ModelShape(json_of(48, 2048, 32, 4, 6144, 151_936, 128, **MIXTURE))
# (model, layout, tokens of a sequence, sequences of a step, TFLOP/s of a GPU, FP8), as docs/planning.md cites them.
PUBLISHED = {
    "405B on 8,192": (LLAMA_405B, Layout(8192, 8, 16, 1, 1, 8, 8), 8192, 2048, 430, False),
    "405B on 16,384": (LLAMA_405B, Layout(16_384, 8, 16, 1, 1, 8, 8), 8192, 2048, 400, False),
    "405B, long": (LLAMA_405B, Layout(16_384, 8, 16, 16, 1, 8, 8), 131_072, 128, 380, False),
    "70B on 64": (LLAMA_70B, Layout(64, 4, 8, 1, 1, 4, 5), 8192, 128, 727, True),
    "70B on 64, twice the batch": (LLAMA_70B, Layout(64, 4, 8, 1, 1, 4, 5), 8192, 256, 728, True),
    "405B on 1,024": (LLAMA_405B, Layout(1024, 8, 8, 2, 1, 8, 8), 8192, 512, 763, True),
    "405B on 1,024, three times the batch": (LLAMA_405B, Layout(1024, 8, 8, 2, 1, 8, 8), 8192, 1536, 784, True),
    "8B on 8, sharded": (LLAMA_8B, Layout(8, 1, 1, 1, 1, 1), 8192, 128, 725, True),
}
FITTED = (QWEN3_30B_A3B, Layout(16, 1, 2, 1, 8, 1, 24), 4096, 512, 241, True)
# Steps of RL: (model, layout, mean and largest tokens of a sequence, responses, TP of an engine, seconds).
STEPS = {
    "8B on 16": (LLAMA_8B, Layout(16, 1, 2, 1, 1, 1), 1060, 4096, 2048, 1, 97.7),
    "32B on 32": (QWEN3_32B, Layout(32, 4, 4, 1, 1, 4), 3206, 4096, 2048, 4, 393),
    "30B-A3B on 32": (QWEN3_30B_A3B, Layout(32, 2, 1, 1, 8, 1), 3154, 4096, 2048, 4, 225),
    "30B-A3B on 32, v0.6": (QWEN3_30B_A3B, Layout(32, 1, 1, 1, 8, 1), 3203, 4096, 2048, 2, 192),
}
PROMPT, MINI_BATCH = 100, 512  # tokens of a prompt (an assumption), and responses of an update


def state_of(s, layout):
    count = sum(parameter.count for chunk in stage_chunks(s, layout, layout.pp - 1, False) for parameter in chunk)
    return State(2 * count, 4 * count, 12 * count // (layout.dp * layout.cp))


def predicted(s, layout, length, sequences, fp8, sharded=False):
    """TFLOP/s per GPU (without overlap, with all links overlapped), by the published count of FLOPs. `sharded`: each
    micro-batch gathers the weights twice and scatters the gradients."""
    chip = device("h100")
    chip = replace(chip, flops=2 * chip.flops) if fp8 else chip
    of_fused = replace(Efficiency(), memory=Efficiency().memory / 0.4)  # the traffic with fused kernels: an assumption
    machine = Machine(chip, of_fused, s, layout, layout.tp > 1, "selective")
    state, tokens = state_of(s, layout), length * sequences
    found = machine.passes(tokens, length, length, backward=True) + machine.update(state)
    if sharded:
        found += Bounds(0, 3 * machine.ring(state.weights, layout.dp, 1) * sequences / layout.dp)
    flops = 6 * tokens * (s.multiplied + len(s.mixture) * length * s.q)
    return tuple(flops / seconds / layout.world / 1e12 for seconds in (found.most, found.least))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_runs(name):
    s, layout, length, sequences, published, fp8 = PUBLISHED[name]
    slow, quick = predicted(s, layout, length, sequences, fp8, "sharded" in name)
    assert slow == pytest.approx(published, rel=0.25), (slow, quick)
    assert quick > 0.95 * published


def test_the_run_that_the_efficiency_of_experts_is_fitted_to():
    *run, published, fp8 = FITTED
    assert predicted(*run, fp8)[0] == pytest.approx(published, rel=0.05)


def step_of_rl(s, layout, mean, longest, responses, workers):
    """Seconds (lower bound, upper bound): log-probs of policy and reference, updates, generation. Torch's kernels."""
    machine = Machine(device("h100"), Efficiency(), s, layout, layout.tp > 1, "selective")
    update = machine.passes(mean * MINI_BATCH, longest, mean, True) + machine.update(state_of(s, layout))
    found = update * (responses // MINI_BATCH) + machine.passes(mean * responses, longest, mean, False) * 2
    engine = EngineEstimate(machine.chip, Efficiency(), s, workers, 256)
    each = math.ceil(responses * workers / layout.world)
    least, most = engine.seconds(1, each, PROMPT, mean - PROMPT, longest - PROMPT)
    return found.least + least, found.most + most


@pytest.mark.parametrize("name", STEPS)
def test_published_steps_of_rl_take_longer_than_both_bounds(name):
    """The bounds leave out packing, waits between the phases, and the refit of the engines."""
    *run, published = STEPS[name]
    least, most = step_of_rl(*run)
    assert least < most < published < 3 * most, (least, most)


def test_the_shipped_recipe_of_a_mixture_beside_the_published_step():
    """examples/pipo/qwen3_30b_a3b has another layout for the same model on as many GPUs."""
    recipe = load(ROOT / "examples/pipo/qwen3_30b_a3b/grpo.yaml")
    s, layout, *batch, _, _ = STEPS["30B-A3B on 32, v0.6"]
    own, engine = Layout.of(recipe.megatron, layout.world), recipe.vllm.tensor_parallel_size
    steps = step_of_rl(s, own, *batch, engine), step_of_rl(s, layout, *batch, 2)
    assert [[round(bound) for bound in bounds] for bounds in steps] == [[68, 94], [91, 110]]  # as in docs/planning.md


def test_copies_for_experts_of_the_own_node_do_not_take_the_network():
    """Of 32 ranks that share the experts, 7 others are in the node."""
    chip, layout = device("h100"), Layout(32, 1, 1, 1, 32, 1)
    machine = Machine(chip, Efficiency(latency=0, link=1), QWEN3_30B_A3B, layout, False, None)
    copies = 2 * 1000 * 2048 * 8 / 32  # bytes to each rank, there and back
    wanted = 2 * copies * (7 / chip.nvlink + 24 / chip.network)
    assert machine._links(1000, True) == pytest.approx(wanted)


def test_a_rehearsed_micro_batch():
    """Four layers of an 8B model over TP 4, 17,688 tokens: 37 ms of kernels forward, 109 ms with backward; links 6 and
    15 ms (`megatron-rft rehearse`)."""
    s = dense(4096, 4, 32, 12_288, 151_936, qk_norm=True)
    machine = Machine(device("h100"), Efficiency(), s, Layout(8, 4, 1, 1, 1, 4), True, "selective")
    forward, both = (machine.micro_batch(17_688, 2000, backward) for backward in (False, True))
    assert forward.kernels == pytest.approx(0.0369, rel=0.1) and both.kernels == pytest.approx(0.109, rel=0.1)
    assert forward.links == pytest.approx(0.0062, rel=0.25) and both.links == pytest.approx(0.0151, rel=0.25)


def test_options_change_the_seconds_of_a_step():
    def step(layout, **more):
        options = {"sequence_parallel": layout.tp > 1, "recompute": "selective"} | more
        machine = Machine(device("h100"), Efficiency(), LLAMA_70B, layout, **options)
        return machine.passes(1 << 22, 1 << 14, 4096, backward=True)

    plain = step(Layout(64, 8, 1, 1, 1, 8))
    assert step(Layout(64, 8, 1, 1, 1, 8), recompute="full").kernels > 1.2 * plain.kernels
    assert step(Layout(64, 4, 1, 1, 1, 4)).links < plain.links
    assert step(Layout(128, 8, 1, 1, 1, 8)).kernels == pytest.approx(plain.kernels / 2, rel=0.05)
    bubble = step(Layout(64, 8, 4, 1, 1, 8)).kernels
    assert step(Layout(64, 8, 4, 1, 1, 8, 5)).kernels < bubble
