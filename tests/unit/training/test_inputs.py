"""A resumed run says which of the models and adapters that it reads again have changed."""

import pytest

from megatron_rft.config import load
from megatron_rft.data.stream import Stream
from megatron_rft.training.run import changed, inputs

MODELS = {
    "model.path": ["model"],
    "model.reference": ["model.reference", "algorithm.kl_coefficient=0.1"],
    "critic.path": ["critic.path", "critic.lr=1e-5", "algorithm.name=ppo"],
    "teacher": ["distil.teacher"],
    "teacher code": ["distil.teacher.code", "data.teacher_field=kind"],
    "lora.path": ["lora.path"],
}


@pytest.mark.parametrize("name", MODELS)
def test_each_model_has_a_digest(tmp_path, name):
    """The resumed run's option has the same path, with other weights."""
    files = {"model": "model.safetensors", "other": "model.safetensors", "lora": "adapter_model.safetensors"}
    for folder, file in files.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / file).write_bytes(bytes(8) + b"weights")
    option, *more = MODELS[name]
    folder = "model" if name == "model.path" else "lora" if name == "lora.path" else "other"
    given = [] if name == "model.path" else [f"{option}={tmp_path}/{folder}", *more]
    (tmp_path / "recipe.yaml").write_text(
        f"run: {{output_dir: {tmp_path}/out, steps: 10}}\nmodel: {{path: {tmp_path}/model}}\n"
        "data: {train: examples/quickstart/arithmetic.py:rows}\n"
    )
    recipe, stream = load(tmp_path / "recipe.yaml", given), Stream(["a row"])

    def now() -> dict[str, str]:
        return inputs(recipe.models, recipe.lora and recipe.lora.path, stream)

    before = now()
    (tmp_path / folder / files[folder]).write_bytes(bytes(8) + b"WEIGHTS")
    (sentence,) = changed(before, now(), 7)
    assert sentence.startswith(f"{name} is no longer what it was in the checkpoint of step 7")
