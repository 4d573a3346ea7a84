"""Every shipped recipe fits the nodes that its script in launch/ requests: 8 GPUs of 80 GiB, with room to spare."""

import json
import re
from pathlib import Path

import pytest

from megatron_rft.config import load
from megatron_rft.plan import memory, model_shape
from megatron_rft.plan.devices import Efficiency
from megatron_rft.plan.engines import check_engines, check_speed
from megatron_rft.plan.layout import check_layout
from megatron_rft.plan.search import Search
from tests.shapes import json_of
from tools import tail
from tools.generation import EngineEstimate

ROOT = Path(__file__).resolve().parents[3]
MODELS = json.loads((Path(__file__).parent / "shipped_models.json").read_text())
BUILT = ("tiny", "miniature", "quickstart")  # models that the examples make themselves
GPUS, GIB = 8, 80


def recipes() -> list[Path]:
    """Complete recipes; common.yaml and parts are bases."""
    found = sorted((ROOT / "examples").glob("*/*/*.yaml"))
    return [path for path in found if path.name != "common.yaml" and not {"parts", *BUILT} & set(path.parts)]


def nodes_of(path: Path) -> int:
    """The nodes of the script that runs a recipe of the same folder; 1 without a script."""
    for script in (ROOT / "launch").glob("*.sh"):
        if f"{path.parent.relative_to(ROOT)}/" in (text := script.read_text()):
            return int(re.search(r"^#SBATCH.*--nodes=(\d+)", text, re.MULTILINE)[1])
    return 1


def name(path: Path) -> str:
    return str(path.relative_to(ROOT / "examples"))


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Configurations in the places of a download."""
    for model, config in MODELS.items():
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(model_shape, "find_model", lambda path, option="": tmp_path / path)
    return tmp_path


@pytest.mark.parametrize("path", recipes(), ids=name)
def test_it_fits_the_node_of_its_script(path, models):
    recipe = load(path)
    if recipe.trainer == "generate":
        return
    folder = models / recipe.model.path
    layout = check_layout(recipe.megatron, GPUS * nodes_of(path), model_shape.read_shape(folder))
    found = memory.MemoryPlan(recipe, model_shape.read_shape(folder), layout, GIB * memory.GIB)
    used = found.phases | ({"generation": found.phases["generation"] - found.reserve} if found.generates else {})
    spare = {phase: round(1 - size / (GIB * memory.GIB), 3) for phase, size in used.items()}
    assert all(share >= 0.1 for share in spare.values()), spare  # vLLM's reserve is such a share


@pytest.mark.parametrize("size, gpus", [("8b", 1), ("32b", 8)])
def test_adapters_fit_one_gpu_and_one_node(models, size, gpus):
    recipe = load(ROOT / f"examples/lora/qwen3_{size}.yaml")
    folder = models / recipe.model.path
    layout = check_layout(recipe.megatron, gpus, model_shape.read_shape(folder))
    assert f"fits {GIB} GiB" in memory.check_fits(
        memory.MemoryPlan(recipe, model_shape.read_shape(folder), layout, GIB * memory.GIB)
    )


def test_32b_fits_two_nodes_because_the_trainer_makes_room(models):
    path = ROOT / "examples/pipo/qwen3_32b/grpo_pipo.yaml"
    assert nodes_of(path) == 2
    for overrides, fits in (([], True), (["rollout.offload_trainer=false"], False)):
        recipe, folder = load(path, overrides), models / "Qwen/Qwen3-32B"
        layout = check_layout(recipe.megatron, 16, model_shape.read_shape(folder))
        found = memory.MemoryPlan(recipe, model_shape.read_shape(folder), layout, GIB * memory.GIB)
        assert (found.phases["generation"] < GIB * memory.GIB) == fits
        assert (found.host >= found.state.optimizer) == fits  # the reference's weights wait there as well


@pytest.mark.parametrize("gpus, saves", [(8, 0.15), (64, 0.4)])
def test_the_recipes_for_8_and_for_64_gpus_shorten_the_step(models, gpus, saves):
    """By the arithmetic of `plan --search`, generation included, below 75 GiB."""
    seconds = []
    for file in ("grpo_pipo", f"grpo_pipo_{gpus}_gpus"):
        recipe = load(ROOT / f"examples/pipo/qwen3_8b_base/{file}.yaml")
        layout = check_layout(recipe.megatron, gpus, model_shape.read_shape(models / recipe.model.path))
        search = Search(recipe, layout, 79.6, "h100")
        found = search._candidate(layout)
        assert found.memory < 75 * memory.GIB
        seconds.append(found.seconds.most + tail.generation(search, recipe.vllm.tensor_parallel_size))
    assert seconds[1] < (1 - saves) * seconds[0]


def test_half_of_64_gpus_generate_while_the_others_train(models):
    """The longer of the two is at least 10% below the colocated recipe's sum."""
    sizes = model_shape.read_shape(models / "Qwen/Qwen3-8B-Base")
    shape, spent = model_shape.read_shape(models / "Qwen/Qwen3-8B-Base"), []
    servers, workers = [f"http://n{node}:8000" for node in range(5, 9)], 8
    for file, ranks, given in (("grpo_pipo_64_gpus", 64, []), ("grpo_pipo_64_gpus_overlapped", 32, servers)):
        recipe = load(ROOT / f"examples/pipo/qwen3_8b_base/{file}.yaml", [f"rollout.servers=[{','.join(given)}]"])
        check_engines(recipe, ranks, 8)
        check_speed(recipe, None)  # the section vllm is the servers'
        search = Search(recipe, layout := check_layout(recipe.megatron, ranks, shape), 79.6, "h100")
        rollout = recipe.rollout
        prompts = rollout.prompts_per_step * workers // ranks  # as many GPUs as ranks generate
        engine = EngineEstimate(search.chip, Efficiency(), sizes, workers, rollout.max_batch_sequences)
        limit = rollout.max_response_tokens
        generation = tail.tail(engine, prompts, rollout.group_size, recipe.data.max_prompt_tokens / 2, limit / 2, limit)
        spent.append((generation, search._candidate(layout).seconds.most))
    assert recipe.rollout.staleness == 1 and max(spent[1]) < 0.9 * sum(spent[0])


def test_llama_70b_fits_64_gpus(models, tmp_path):
    recipe, folder = load(ROOT / "examples/pipo/llama3.3_70b_64_gpus.yaml"), tmp_path / "llama"
    folder.mkdir()
    config = MODELS["meta-llama/Llama-3.2-3B-Instruct"] | json_of(80, 8192, 64, 8, 28_672, 128_256, 128)
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    layout = check_layout(recipe.megatron, 64, model_shape.read_shape(folder))
    assert memory.MemoryPlan(recipe, model_shape.read_shape(folder), layout, GIB * memory.GIB).largest < 75 * memory.GIB
