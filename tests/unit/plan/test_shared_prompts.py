"""What shared prompts save by the plan's arithmetic: tokens, activations and seconds."""

from types import SimpleNamespace

import pytest

from megatron_rft.config.sections import Batching, Data, Megatron, Rollout
from megatron_rft.plan.activations import activations
from megatron_rft.plan.devices import Efficiency, device
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.seconds import Machine
from megatron_rft.plan.shared_prompts import SharedGroup
from tests.shapes import json_of

S = ModelShape(json_of(36, 4096, 32, 8, 12_288, 151_936, 128, model_type="qwen3"))
DATA = Data(train="examples/quickstart/arithmetic.py:rows", max_prompt_tokens=1024)
ROLLOUT = Rollout(group_size=8, prompts_per_step=16, max_response_tokens=128)


def group(cp=1, data=DATA, rollout=ROLLOUT, fraction=1, **batching):
    batching = Batching(**{"micro_batch_tokens": 16_384} | batching)
    recipe = SimpleNamespace(trainer="rl", batching=batching, data=data, rollout=rollout)
    return SharedGroup.of(recipe, S, Layout(cp, 1, 1, cp, 1, 1), fraction)


def test_a_group_by_hand():
    found = group()
    assert (found.count, found.tokens) == (8, 1024 + 8 * 128)
    assert found.keys == 8 * (1024 + 128) / 2048
    assert found.length == pytest.approx((1024**2 + 8 * (2 * 1024 * 128 + 128**2)) / 2048)
    assert group(fraction=0.5).tokens == 512 + 8 * 64


def test_what_fits_a_micro_batch_and_what_is_off():
    assert group(micro_batch_tokens=1500).count == 3
    for alone in (group(cp=2), group(share_prompts="off"), group(pack_sequences=False)):
        assert (alone.count, alone.tokens, alone.keys, alone.length) == (1, 1152, None, 1152)


def test_a_micro_batch_is_no_larger_than_what_a_rank_has():
    shared, alone = (each.fill(Batching(micro_batch_tokens=16_384), 8) for each in (group(), group(cp=2)))
    assert (shared.micro_batch_tokens, alone.micro_batch_tokens) == (2048, 8 * 1152)
    assert group().fill(Batching(micro_batch_tokens=16_384), 800).micro_batch_tokens == 16_384


def test_activations_and_seconds_fall_as_tokens_do():
    layout, kept, seconds = Layout(8, 4, 1, 1, 1, 4), [], []
    for each in (group(share_prompts="off"), group()):
        batching = each.fill(Batching(micro_batch_tokens=16_384), 8)
        megatron = Megatron(tensor_model_parallel_size=4, sequence_parallel=True)
        kept.append(activations(2, megatron, batching, False, each.keys, S, layout, 0))
        machine = Machine(device("h100"), Efficiency(), S, layout, True, None, keys=each.keys)
        tokens = 128 / each.count * each.tokens
        seconds.append(machine.passes(tokens, 16_384, each.length, backward=True).kernels)
    assert kept[0] / kept[1] > 3.5 and seconds[0] / seconds[1] > 3.5  # tokens: 4.5
