"""What `megatron-rft convert` refuses before it reads a tensor, and the places where it finds a checkpoint."""

import pytest
from transformers import MistralConfig, Qwen3Config

from megatron_rft.commands.convert import convert, find_source
from megatron_rft.config import dump, load
from megatron_rft.conversion import hf_shapes
from megatron_rft.megatron import weights
from megatron_rft.utils.checkpoint_files import DIGESTS, join_digests
from megatron_rft.utils.errors import DataError
from tests.families import SIZES
from tests.shapes import SMALL


def test_a_model_that_cannot_be_represented_is_refused_with_its_folder(tmp_path):
    MistralConfig(**SIZES, sliding_window=None, logits_scaling=8.0).save_pretrained(tmp_path / "model")
    with pytest.raises(DataError, match=f"{tmp_path}/model: .* logits_scaling: 8.0, which the code of mistral"):
        convert(str(tmp_path / "model"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def run(tmp_path, one_rank):
    """A run's folder with a checkpoint, whose model is beside it."""
    config, model = Qwen3Config(**SMALL, architectures=["Qwen3ForCausalLM"]), tmp_path / "model"
    lookup = weights.random_tensors(config, seed=0)
    weights.save_folder(((name, lookup(name)) for name in hf_shapes(config)), model, config)
    step = tmp_path / "run/checkpoints/step_000002"
    convert(str(model), step)
    for name in ("config.json", "conversion.json"):
        (step / name).unlink()
    (step / "run.json").write_text('{"step": 2}')
    join_digests(step)
    write_recipe(tmp_path)
    return tmp_path / "run"


def write_recipe(tmp_path, *overrides):
    (tmp_path / "given.yaml").write_text(
        f"run: {{output_dir: {tmp_path}/run, steps: 2}}\nmodel: {{path: {tmp_path}/model}}\n"
        "data: {train: examples/quickstart/arithmetic.py:rows}\n"
    )
    (tmp_path / "run/recipe.yaml").write_text(dump(load(tmp_path / "given.yaml", [*overrides])))


@pytest.mark.parametrize(
    "place, path",
    [
        (".", "checkpoints/step_000002"),
        (".", "."),
        ("checkpoints", "step_000002"),
        ("checkpoints", "."),
        ("checkpoints/step_000002", "."),
        ("checkpoints/step_000002", "../step_000002"),
    ],
)
def test_the_recipe_is_found_from_any_folder(run, monkeypatch, place, path):
    monkeypatch.chdir(run / place)
    source = find_source(path)
    assert source.path == run / "checkpoints/step_000002" and source.companions == run.parent / "model"


def test_a_damaged_checkpoint_that_is_named_is_refused(run, tmp_path):
    step = run / "checkpoints/step_000002"
    shard = next(step.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=f"{step} is damaged: {shard.name} has other content than was written. Choose"):
        convert(str(step), tmp_path / "out")
    with pytest.raises(DataError, match="no complete and intact checkpoint"):
        convert(str(run), tmp_path / "out")
    (step / DIGESTS).unlink()
    assert find_source(str(step)).path == step


@pytest.mark.parametrize("lora", [[], ["lora.rank=2"]])
def test_a_model_that_was_moved_is_named_once_with_the_fix(run, tmp_path, lora):
    write_recipe(tmp_path, *lora)
    (tmp_path / "model").rename(tmp_path / "moved")
    missing = f"^model.path: there is no such model folder, {tmp_path}/model"
    with pytest.raises(DataError, match=f"{missing}.* if it was moved, name it as `like`"):
        find_source(str(run))


def test_another_model_than_that_of_the_adapters_is_refused_with_like(run, tmp_path):
    """A conversion has no run.output_dir to start in."""
    write_recipe(tmp_path, "lora.rank=2")
    step = run / "checkpoints/step_000002"
    (step / "run.json").write_text('{"step": 2, "inputs": {"model.path": "another"}}')
    (step / DIGESTS).unlink()
    told = "adapters of another model .* Name as `like` the model that they were trained on, which .*/model is not$"
    for like in (None, str(tmp_path / "model")):
        with pytest.raises(DataError, match=told):
            find_source(str(step), like)
