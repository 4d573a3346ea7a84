"""The teacher of a distillation in the plan: what is refused before a run starts, and the bytes of its weights."""

import pytest

from megatron_rft.commands import main
from megatron_rft.config import load
from megatron_rft.config.sections import Megatron
from megatron_rft.plan import teacher
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import MemoryPlan
from megatron_rft.utils.errors import ConfigError
from tests.shapes import write_model
from tests.unit.plan.test_memory import CONFIG, WHOLE, path, sizes  # noqa: F401

GRPO = "algorithm={name: grpo, teacher: null}"


@pytest.fixture
def options(path):  # noqa: F811
    write(path, {})
    return [f"algorithm={{name: distil, teacher: {path.parent}/teacher}}"]


def write(path, change):  # noqa: F811
    write_model(path.parent / "teacher", CONFIG | change)


def test_its_weights_wait_in_host_memory(path, options):  # noqa: F811
    layout = Layout(1, 1, 1, 1, 1, 1)
    memory = MemoryPlan(load(path, [*options, "model.precision=bf16"]), sizes(path), layout)
    assert memory.host == memory.other == 2 * WHOLE


def test_several_wait_together_and_compute_one_at_a_time(path, options, capsys):  # noqa: F811
    write_model(path.parent / "other", CONFIG | {"intermediate_size": 32})
    both = f"algorithm.teacher={{a: {path.parent}/teacher, b: {path.parent}/other}}"
    options = [*options, both, "data.teacher_field=kind", "model.precision=bf16"]
    memory = MemoryPlan(load(path, options), sizes(path), Layout(1, 1, 1, 1, 1, 1))
    larger = WHOLE + 2 * 3 * 8 * 16  # two layers' three matrices
    assert memory.host == 2 * (WHOLE + larger) and memory.other == 2 * larger
    assert main.main(["plan", str(path), *options]) == 0
    assert capsys.readouterr().out.count("its weights in host memory while idle") == 2


@pytest.mark.parametrize(
    "change, more, message",
    [
        ({"vocab_size": 9}, [], "has 9 rows, fewer than the model's 10"),
        ({"max_position_embeddings": 64}, [], "beyond its 64 positions"),
        ({}, ["algorithm.jsd_beta=0.2"], "algorithm.jsd_beta: does nothing with divergence reverse_kl"),
        ({}, ["pipo.window=4"], "pipo: verifies by rewards, and distil uses none"),
        ({}, ["data.teacher_field=x"], "data.teacher_field: does nothing with one teacher"),
        ({}, ["algorithm.teacher={a: x}"], "data.teacher_field: is missing: it says which of the teachers a row has"),
        ({}, ["distil.teacher=x"], "distil: the loss of distil with these options compares with another distribution"),
        (
            {},
            ["algorithm={name: grpo, teacher: null}", "reward.kind=none"],
            "reward.kind: none: grpo learns from rewards",
        ),
        (
            {},
            ["reward.kind=none", "data.test=examples/quickstart/arithmetic.py:rows"],
            "data.test: does nothing with reward.kind none",
        ),
    ],
)
def test_what_is_refused(path, options, change, more, message, capsys):  # noqa: F811
    write(path, change)
    assert main.main(["plan", str(path), *options, *more]) == 2
    assert message in capsys.readouterr().err


def test_a_mixture_needs_sequence_parallelism(path, options):  # noqa: F811
    mixture = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    write(path, mixture | dict(model_type="qwen3_moe", head_dim=4))
    folder, layout = str(path.parent / "teacher"), Layout(2, 2, 1, 1, 1, 2)
    teacher.check(folder, None, Megatron(), Layout(1, 1, 1, 1, 1, 1), 8)
    with pytest.raises(ConfigError, match="teacher: a mixture of experts with tensor parallelism needs"):
        teacher.check(folder, None, Megatron(tensor_model_parallel_size=2), layout, 8)
