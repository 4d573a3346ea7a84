"""`plan --search`: the layouts that it lists, their order, and its messages."""

import json

import pytest

from megatron_rft.commands import main
from megatron_rft.config import load
from megatron_rft.plan.layout import Layout, problems
from megatron_rft.plan.search import Search
from tests.shapes import json_of

CONFIG = json_of(36, 4096, 32, 8, 12_288, 151_936, head_dim=128, model_type="qwen3", tie_word_embeddings=False)
CONFIG |= dict(max_position_embeddings=40_960)


@pytest.fixture
def plan(tmp_path, capsys):
    def run(*arguments):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(
            f"run: {{output_dir: {tmp_path}/out, steps: 2}}\n"
            f"model: {{path: {tmp_path}, initialise: random, precision: bf16}}\n"
            "data: {train: examples/quickstart/arithmetic.py:rows}\nalgorithm: {name: grpo}\n"
            "batching: {micro_batch_tokens: 16384}\n"
            "megatron: {tensor_model_parallel_size: 8, sequence_parallel: true}\n"
        )
        return main.main(["plan", str(recipe), *arguments]), *capsys.readouterr()

    return run


def rows(told):
    return [line for line in told.splitlines() if " s  " in line]


def test_layouts_that_fit_by_speed(plan):
    status, told, _ = plan("--gpus", "16", "--gpu-gib", "80", "--search")
    found = rows(told)
    assert status == 0 and len(found) > 3
    slowest = [float(line.split()[2]) for line in found]
    assert slowest == sorted(slowest)
    assert [line for line in found if "the recipe's" in line] == [
        line for line in found if "TP 8 x PP 1 x CP 1" in line
    ]
    assert "TP 1 x PP 1" not in "\n".join(found)  # 8B parameters with 4 bytes of gradients each: 45 GiB and activations


def test_a_recipe_that_does_not_fit_is_listed_all_the_same(plan):
    status, told, _ = plan("--gpus", "16", "--gpu-gib", "14", "--search", "megatron.tensor_model_parallel_size=4")
    assert status == 0 and "the recipe's, which does not fit" in told and "memory without a GPU" not in told


def test_the_memory_must_be_given(plan):
    status, _, error = plan("--gpus", "16", "--search")
    assert status == 2 and "--search needs --gpu-gib" in error
    status, _, error = plan("--gpus", "16", "--search", "--gpu-gib", "80", "--device", "h200x")
    assert status == 2 and "no device 'h200x'" in error
    status, _, error = plan("--gpus", "16", "--device", "a100")
    assert status == 2 and "--device: only --search estimates the time on a device" in error


def test_every_layout_of_a_mixture_can_be_run(tmp_path):
    mixture = dict(model_type="qwen3_moe", num_experts=8, moe_intermediate_size=768, num_experts_per_tok=2)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | mixture))
    sections = dict(run={"output_dir": "-", "steps": 2}, data={"train": "examples/quickstart/arithmetic.py:rows"})
    recipe = load(sections, model={"path": str(tmp_path), "initialise": "random"})
    search = Search(recipe, Layout(8, 2, 1, 1, 2, 2), 80.0, "h100")
    layouts = search._layouts()
    assert any(each.etp < each.tp for each in layouts)
    assert not [str(each) for each in layouts if list(problems(each, search.s))]
