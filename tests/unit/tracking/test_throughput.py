"""Model FLOPs by hand, and the peak of a device by its name."""

import pytest
import torch

from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.records import Batch
from megatron_rft.tracking import throughput as module
from megatron_rft.tracking.observer import Trained
from megatron_rft.tracking.throughput import FreePages, Throughput, peak_tflops
from tests.shapes import json_of

EXPERTS = dict(num_experts=4, moe_intermediate_size=3, num_experts_per_tok=2, mlp_only_layers=[0])
DENSE = ModelShape(json_of(2, 4, 2, 1, 8, 10, 2, model_type="qwen3"))
MIXTURE = ModelShape(json_of(2, 4, 2, 1, 8, 10, 2, model_type="qwen3_moe", **EXPERTS))
ATTENTION = 16 + 8 + 8 + 16  # q, k, v, o


def test_parameters_that_multiply_a_token():
    assert DENSE.multiplied == 2 * (ATTENTION + 3 * 32) + 40
    assert MIXTURE.multiplied == 2 * ATTENTION + 3 * 32 + (2 * 3 * 12 + 16) + 40


def train(throughput: Throughput, batch: Batch) -> None:
    throughput.trained(Trained(1, "policy", batch, batch, {}))


def rates(throughput: Throughput, metrics: dict[str, float]) -> dict[str, float]:
    found = dict(metrics)
    throughput.end_of_step(1, found)
    return {name: found[name] for name in found if name not in metrics}


def test_share_of_the_peak():
    throughput = Throughput(DENSE, devices=2, peak=1e-6)  # a million FLOP/s each
    train(throughput, Batch.of([[1], []], [[1, 2], [1]]))
    flops = 3 * (2 * DENSE.multiplied * 4 + 2 * 2 * 4 * (9 + 1))  # two layers, q = 4, squares of the lengths
    found = rates(throughput, {"seconds/training": 2.0, "seconds/verification": 1.0, "seconds/step": 5.0})
    assert found == {
        "tokens/trained_per_second_per_device": 4 / 3 / 2,
        "training/mfu": pytest.approx(flops / (3 * 2 * 1e6)),
    }
    assert rates(throughput, {"seconds/step": 1.0}) == {}


def test_a_shared_prompt_costs_once():
    """Lengths 3, 3, 4; the first two share a prompt of 2 tokens, so of the second only one token is computed, which
    attends to 3."""
    throughput = Throughput(DENSE, devices=1, peak=1e-6, share_prompts=True)
    train(throughput, Batch.of([[1, 2], [1, 2], [2, 1]], [[5], [6], [7, 8]]))
    assert throughput.tokens == 10
    assert throughput.flops == 3 * (2 * DENSE.multiplied * 8 + 2 * 2 * 4 * (9 + (9 - 4) + 16))


def test_segments_attend_to_themselves():
    """Segments of 2 + 2 and 1 + 2 tokens."""
    throughput = Throughput(DENSE, devices=1, peak=1e-6)
    train(throughput, Batch.of([[1, 2]], [[5, 6, 7, 8, 9]]).with_segments([[0, -1, 1, 1, 0]]))
    assert throughput.flops == 3 * (2 * DENSE.multiplied * 7 + 2 * 2 * 4 * (16 + 9))


def test_tokens_per_second_and_device():
    found = rates(Throughput(DENSE, 4, None), {"tokens/generated": 80.0, "seconds/step": 2.0})
    assert found == {"tokens/per_second": 40.0, "tokens/per_second_per_device": 10.0}


@pytest.mark.parametrize(
    "device, peak",
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A800-SXM4-80GB", 312.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA H20", 148.0),
        ("somebody's card", None),
        (None, None),
    ],
)
def test_the_peak_of_a_device(device, peak, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: device)
    assert peak_tflops() == peak


def test_free_pages_go_back_every_ten_seconds(monkeypatch):
    returned, pages = [], FreePages()
    monkeypatch.setattr(module, "return_free_pages", lambda: returned.append(now))
    for now in (100.0, 104.0, 109.9, 110.0, 112.0, 130.0):
        monkeypatch.setattr(module.time, "monotonic", lambda now=now: now)
        pages.end_of_step(1, {})
    assert returned == [100.0, 110.0, 130.0]
