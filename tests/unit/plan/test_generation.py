"""The arithmetic of an engine's decoding by hand."""

from dataclasses import replace

import pytest

from megatron_rft.plan.devices import Device, Efficiency
from megatron_rft.plan.model_shape import ModelShape
from tests.shapes import json_of
from tools import tail
from tools.generation import KERNELS, EngineEstimate

EXPERTS = dict(model_type="qwen3_moe", num_experts=4, moe_intermediate_size=2, num_experts_per_tok=1)
DENSE, MIXTURE = (ModelShape(json_of(2, 4, 2, 1, 8, 16, 2, **more)) for more in ({}, EXPERTS))
PERFECT = Efficiency(compute=1, memory=1, link=1, launch=0.5, latency=0)


def chip(flops=1e30, bandwidth=1e30):
    return Device("chip", flops, bandwidth, 1.0, 1.0)


def test_weights_once_a_step_and_the_cache_of_each_token():
    engine = EngineEstimate(chip(bandwidth=2.0), PERFECT, DENSE, 1, places=4)
    weights = DENSE.multiplied * 2 / 2
    cache = 8 * 10 * (6 + 5) * (2 * 2 * 2 * 2) / 2  # 8 responses of 10 tokens behind 6; 2 layers, keys and values of 2
    least, most = engine.seconds(prompts=2, group=4, prompt=6, response=10, longest=15)
    assert least == pytest.approx(20 * weights + cache)  # 80 tokens in 4 places
    assert most == pytest.approx(30 * (weights + 2 * KERNELS * 0.5) + cache)  # two batches of 15 steps
    alone, _ = engine.seconds(prompts=1, group=1, prompt=6, response=10, longest=15)
    assert alone == pytest.approx(15 * weights + 10 * 11 * 16 / 2)


def test_a_large_batch_is_bound_by_its_products_and_prompts_count_once():
    engine = EngineEstimate(chip(flops=1.0), PERFECT, DENSE, 2, places=64)
    least, _ = engine.seconds(prompts=2, group=4, prompt=6, response=10, longest=15)
    assert least == pytest.approx(2 * DENSE.multiplied * (80 + 12) / 2)


def test_each_device_reads_a_head_at_least():
    sizes = [EngineEstimate(chip(), PERFECT, DENSE, devices, places=4).token for devices in (1, 2, 4)]
    assert sizes == [16, 32, 64]  # 2 layers, keys and values of 2 in 2 bytes; there is one head


def test_the_tail_takes_the_reached_share_of_its_roofline():
    """All responses as long as the limit: each of 10 steps reads the weights and the keys and values before it."""
    engine = EngineEstimate(chip(bandwidth=2.0), replace(PERFECT, launch=0), DENSE, 1, places=4)
    roofline = 10 * DENSE.multiplied * 2 / 2 + 4 * 10 * (6 + 5) * 16 / 2
    assert tail.tail(engine, 1, 4, 6, 10, 10) == pytest.approx(roofline / tail.REACHED)


def test_a_mixture_reads_the_experts_that_are_chosen():
    one, many = (EngineEstimate(chip(), PERFECT, MIXTURE, 1, places=n).read(n) for n in (1, 1000))
    expert = 3 * 4 * 2
    assert one == pytest.approx(MIXTURE.multiplied)
    assert many == pytest.approx(MIXTURE.multiplied + 2 * 3 * expert)


def test_lengths_have_the_mean_and_one_of_a_hundred_reaches_the_limit():
    parts = 4096
    mean = sum(4 * tail.share_longer((i + 0.5) * 4, 1000, 4096) for i in range(parts))  # also beyond the limit
    assert mean == pytest.approx(1000, rel=0.02)
    assert tail.share_longer(4096, 1000, 4096) == pytest.approx(0.01)
    assert tail.share_longer(4000, 4096, 4096) == 1.0  # every response is as long as the limit
