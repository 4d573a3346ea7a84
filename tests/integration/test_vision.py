"""Runs on pictures: the example in small, killed and resumed, over two ranks, and what is refused."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.tiny import ROOT, metrics, train

EXAMPLE = ROOT / "examples/vision"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    (folder / "odd.py").write_text("def odd(prompt, text):\n    return float(len(text) % 2)\n")
    subprocess.run([sys.executable, EXAMPLE / "make.py", folder], check=True, cwd=ROOT)
    return folder


def options(made, out, *more):
    small = ["rollout.prompts_per_step=4", "rollout.group_size=4", "data.limit=12", "model.initialise=random"]
    small += ["evaluation.every=0", "data.validation=null", "data.test=null", "checkpoint.every=2", "run.steps=4"]
    files = [f"model.path={made}/model", f"data.train={made}/train.jsonl", f"run.output_dir={out}"]
    learns = ["pipo.window=2", "optimizer.lr_decay_style=constant", f"reward.function={made}/odd.py:odd"]
    return [*files, *small, *learns, *more]


def weights(out):
    return load_file(out / "export/model.safetensors")


def test_a_resumed_run_is_that_of_one_start_and_two_ranks_learn_the_same(made, tmp_path):
    recipe = EXAMPLE / "grpo.yaml"
    for out, more in (("whole", []), ("parts", ["run.steps=2"]), ("parts", []), ("two", ["--nproc", "2"])):
        status, output = train(recipe, *options(made, tmp_path / out, *more))
        assert status == 0, output[-3000:]
    whole, parts, two = (weights(tmp_path / out) for out in ("whole", "parts", "two"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert all(torch.allclose(whole[name], two[name], atol=1e-4) for name in whole)
    for out in ("whole", "parts", "two"):
        assert max(line["mismatch/kl"] for line in metrics(tmp_path / out)[1:]) < 1e-9
    start = metrics(tmp_path / "whole")
    assert any(name.startswith("visual.") for name in whole) and len(start) >= 4


def test_a_frozen_tower_stays_as_it_was(made, tmp_path):
    for name, vision in (("frozen", "frozen"), ("trained", "trained")):
        status, output = train(EXAMPLE / "grpo.yaml", *options(made, tmp_path / name, f"model.vision={vision}"))
        assert status == 0, output[-3000:]
    frozen, trained = weights(tmp_path / "frozen"), weights(tmp_path / "trained")
    tower = [name for name in frozen if name.startswith("visual.") and name.endswith("proj.weight")]
    assert not any(torch.equal(frozen[name], trained[name]) for name in tower)
    other, output = train(
        EXAMPLE / "grpo.yaml", *options(made, tmp_path / "again", "model.vision=frozen", "run.steps=1")
    )
    assert other == 0, output[-3000:]
    again = weights(tmp_path / "again")
    assert all(torch.equal(frozen[name], again[name]) for name in frozen if name.startswith("visual."))
    assert not torch.equal(frozen["model.embed_tokens.weight"], again["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("lora={rank: 4}", "images are not supported with lora"),
        ("rollout.placement=process", "images are not supported with rollout.placement process"),
        ("data.chat=false", "images need a chat template: set data.chat=true"),
        ("batching.pack_sequences=false", "images are not supported with batching.pack_sequences false"),
    ],
)
def test_what_does_not_go_with_images_is_refused(made, tmp_path, option, words):
    status, output = train(EXAMPLE / "grpo.yaml", *options(made, tmp_path / "run", option))
    assert status == 2 and words in output and "Traceback" not in output, output[-2000:]
