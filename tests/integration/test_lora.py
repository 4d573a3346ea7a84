"""Runs that train adapters: kill -9 and resume, another layout, PEFT's folder, another base, a critic, a teacher."""

import json
import shutil
from concurrent.futures import ProcessPoolExecutor
from itertools import zip_longest
from multiprocessing import get_context

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import AutoModelForCausalLM

from megatron_rft.commands.main import main
from megatron_rft.config import load
from megatron_rft.conversion.torch_dist import read_metadata
from megatron_rft.megatron import optimizer_shards
from megatron_rft.plan.vllm import unusable
from megatron_rft.training.build import load_model_files
from megatron_rft.utils.errors import DataError
from tests.integration.test_constraint import SECTIONS
from tests.integration.test_kill_and_resume import assert_same_run, killed
from tests.integration.test_online_algorithms import CLOSED, recipe_of
from tests.integration.tiny import metrics, train, write_recipe

LORA = {"rank": 4, "alpha": 8.0}
PIPO = {"window": 2, "learning_rate": 1e-2, "optimizer_state": "own"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of the recipe and the run of an uninterrupted run with PIPO."""
    folder = tmp_path_factory.mktemp("lora")
    recipe = write_recipe(folder, lora=LORA, pipo=PIPO, model={"precision": "bf16"}, checkpoint={"every": 2, "keep": 9})
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    assert "3712 parameters are trained" in output
    return folder


def elements(checkpoint) -> dict[str, int]:
    """The stored numbers of the model and of the optimizer; they are all of adapters or of a value head."""
    stored = read_metadata(checkpoint).state_dict_metadata.items()
    sizes = {key: found.size.numel() for key, found in stored if isinstance(found, TensorStorageMetadata)}
    model = {key: size for key, size in sizes.items() if size > 1}
    ranges = [each for _, _, each in optimizer_shards.index(checkpoint)]
    for key in (*model, *(each["key"] for each in ranges)):
        assert ".adapter." in key or "output_layer" in key, key
    numbers = sum(each["stop"] - each["start"] for each in ranges) * len(optimizer_shards.NAMES)
    return {"": sum(model.values()), "optimizer": numbers}


def adapters(run):
    return load_file(run / "adapters/adapter_model.safetensors")


def test_killed_and_resumed_it_ends_with_the_same_bits(undisturbed, tmp_path):
    killed(undisturbed / "recipe.yaml", tmp_path / "run", step=3)
    status, output = train(undisturbed / "recipe.yaml", f"run.output_dir={tmp_path}/run")
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert_same_run(tmp_path / "run", undisturbed / "run")
    mine, theirs = adapters(tmp_path / "run"), adapters(undisturbed / "run")
    assert len(mine) == 28 and all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_with_dropout_too_it_resumes_with_the_same_bits(tmp_path):
    recipe = write_recipe(tmp_path, lora=LORA | {"dropout": 0.3})
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    killed(recipe, tmp_path / "again", step=3)
    assert train(recipe, f"run.output_dir={tmp_path}/again")[0] == 0
    assert_same_run(tmp_path / "again", tmp_path / "run")


def test_a_checkpoint_has_the_adapters_alone_and_resumes_in_another_layout(undisturbed, tmp_path):
    checkpoint = undisturbed / "run/checkpoints/step_000002"
    assert elements(checkpoint) == {"": 3712, "optimizer": 2 * 3 * 3712}  # two sets of fp32 weights and two moments
    shutil.copytree(undisturbed / "run", tmp_path / "run")
    for later in ("step_000004", "step_000006"):
        shutil.rmtree(tmp_path / "run/checkpoints" / later)
    arguments = (f"run.output_dir={tmp_path}/run", "run.steps=3", "--nproc", "2")
    status, output = train(undisturbed / "recipe.yaml", *arguments, "megatron.tensor_model_parallel_size=2")
    assert status == 0 and "resumed after step 2" in output, output[-3000:]
    before, after = metrics(undisturbed / "run")[3], metrics(tmp_path / "run")[3]
    assert after["policy/grad_norm"] == pytest.approx(before["policy/grad_norm"], rel=0.05)  # bf16
    assert after["reward/mean"] == before["reward/mean"]


def test_another_base_is_refused(undisturbed, tmp_path, capsys):
    shutil.copytree(undisturbed, tmp_path / "all")
    config = json.loads((tmp_path / "all/model/config.json").read_text())
    (tmp_path / "all/model/config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    for checkpoint in (tmp_path / "all/run/checkpoints").iterdir():
        if checkpoint.name != "step_000002":
            shutil.rmtree(checkpoint)
    arguments = [f"run.output_dir={tmp_path}/all/run", f"model.path={undisturbed}/model"]
    (undisturbed / "model/config.json").rename(undisturbed / "model/kept")
    shutil.copy(tmp_path / "all/model/config.json", undisturbed / "model/config.json")
    try:
        assert main(["train", str(undisturbed / "recipe.yaml"), *arguments]) == 2
    finally:
        (undisturbed / "model/kept").rename(undisturbed / "model/config.json")
    assert "step_000002 has adapters of another model" in capsys.readouterr().err


def for_vllm(model):
    """vLLM's attention on the CPU needs larger heads than those of the tiny model."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"head_dim": 32}))


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """A run on a model of given weights, and its folder."""
    folder = tmp_path_factory.mktemp("pretrained")
    first = write_recipe(folder, run={"steps": 1, "seed": 3})
    for_vllm(folder / "model")
    assert train(first)[0] == 0
    shutil.rmtree(folder / "model")
    shutil.move(folder / "run/export", folder / "model")
    shutil.rmtree(folder / "run")
    recipe = write_recipe(folder, run={"steps": 2, "seed": 3}, lora=LORA, model={"initialise": "pretrained"})
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    return folder


@torch.no_grad()
def test_peft_loads_the_folder_and_has_the_logits_of_the_export(pretrained):
    ids = torch.arange(8)[None]
    base = AutoModelForCausalLM.from_pretrained(pretrained / "model", dtype=torch.float32)
    plain = base(ids).logits
    found = PeftModel.from_pretrained(base, pretrained / "run/adapters")(ids).logits
    export = AutoModelForCausalLM.from_pretrained(pretrained / "run/export", dtype=torch.float32)(ids).logits
    assert (found - export).abs().max() < 1e-5 < 1e-3 < (found - plain).abs().max()


def vllm_logprobs(model, adapters=None):
    """vLLM's greedy tokens after four prompts, and their positions' log-probs of the whole vocabulary."""
    from megatron_rft.inference.vllm import cpu_patches

    cpu_patches.prepare()
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sizes = {"max_model_len": 64, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 26, "max_logprobs": 8}
    options = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "generation_config": "vllm"}
    engine = cpu_patches.start({"model": str(model), "enable_lora": adapters is not None, **sizes, **options})
    asked = LoRARequest("adapters", 1, str(adapters)) if adapters else None
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=8, detokenize=False)
    found = {}
    try:
        for i in range(4):
            engine.add_request(f"{i}", {"prompt_token_ids": [3 + i, 4, 5][: 1 + i % 3]}, sampling, lora_request=asked)
        while engine.has_unfinished_requests():
            found |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    finally:
        cpu_patches.shut_down(engine)
    outputs = [found[f"{i}"] for i in range(4)]
    logprobs = [[[place[token].logprob for token in range(8)] for place in each.logprobs] for each in outputs]
    return [list(each.token_ids) for each in outputs], torch.tensor(logprobs)


@pytest.mark.slow
@pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
def test_vllm_serves_the_folder_as_the_merged_model(pretrained):
    asked = [(pretrained / "model", pretrained / "run/adapters"), (pretrained / "run/export",), (pretrained / "model",)]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:  # vLLM changes its process
        (tokens, found), (merged_tokens, merged), (_, plain) = other.map(vllm_logprobs, *zip_longest(*asked))
    assert tokens == merged_tokens
    assert (found - merged).abs().max() < 1e-5 < 1e-2 < (found - plain).abs().max()


def test_convert_writes_a_peft_folder_and_the_merged_model(pretrained, tmp_path, capsys):
    run, adapted, merged = pretrained / "run", tmp_path / "adapters", tmp_path / "merged"
    assert main(["convert", str(run), str(adapted), "--to", "peft"]) == 0
    assert main(["convert", str(run), str(merged)]) == 0
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (adapted, run / "adapters"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for file in ("adapter_config.json", "base.json"):
        assert (adapted / file).read_text() == (run / "adapters" / file).read_text()
    export, first = (load_file(folder / "model.safetensors") for folder in (run / "export", merged))
    assert all(torch.allclose(first[name], tensor, atol=1e-6) for name, tensor in export.items())
    shutil.copytree(run / "checkpoints/step_000002", tmp_path / "alone")
    capsys.readouterr()
    for arguments, message in (
        ([str(run / "export"), "--to", "peft"], "to: peft needs a source that trains adapters: a run, or"),
        (
            [str(run), "--like", str(run / "export")],
            f"`like` the model that they were trained on, which {run}/export is not",
        ),
        ([str(adapted)], "has adapters alone: PEFT's merge_and_unload makes a model"),
        ([str(tmp_path / "alone"), "--like", str(run / "export")], "has adapters alone"),
    ):
        assert main(["convert", arguments[0], str(tmp_path / "no"), *arguments[1:]]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_a_run_starts_from_the_folder(pretrained, tmp_path, capsys):
    recipe, out = pretrained / "recipe.yaml", f"run.output_dir={tmp_path}/run"
    status, output = train(recipe, out, f"lora.path={pretrained}/run/adapters", "optimizer.lr=1e-30", "run.steps=1")
    assert status == 0, output[-3000:]
    mine, theirs = adapters(tmp_path / "run"), adapters(pretrained / "run")
    assert all(torch.allclose(mine[name], theirs[name], atol=1e-9) for name in theirs)
    assert metrics(tmp_path / "run")[1]["policy/kl"] == pytest.approx(0, abs=1e-6)  # the reference starts there too
    shutil.copytree(pretrained / "run/adapters", tmp_path / "other")
    (tmp_path / "other/base.json").write_text('{"fingerprint": "of another"}')
    for change, message in (
        (f"lora.path={tmp_path}/other", "were trained on another model than the one given"),
        (f"lora.path={pretrained}/run/adapters lora.rank=5", "has r 4, and this recipe's `lora` means 5"),
        (f"lora.path={tmp_path}", "is no folder of adapters in PEFT's format"),
    ):
        with pytest.raises(DataError, match=f"^lora.path: .*{message}"):  # before a model is built
            given = load(recipe, change.split())
            load_model_files(given.model, given.run.seed, given.lora)
        assert main(["train", str(recipe), f"run.output_dir={tmp_path}/no", *change.split()]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1, error


def test_supervised_training_takes_adapters(tmp_path):
    path = write_recipe(tmp_path, run={"steps": 6, "seed": 3}, lora=LORA)
    own = {
        "trainer": "sft",
        "algorithm": {"batch_sequences": 16},
        "rollout": {"engine": "hf", "max_response_tokens": 2},
    }
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | own))
    status, output = train(path)
    assert status == 0 and "3712 parameters are trained" in output, output[-3000:]
    losses = [line["policy/loss"] for line in metrics(tmp_path / "run") if "policy/loss" in line]
    assert losses[-1] < losses[0] and elements(tmp_path / "run/checkpoints/step_000006")[""] == 3712, losses
    assert any(tensor.any() for name, tensor in adapters(tmp_path / "run").items() if "lora_B" in name)


@pytest.mark.slow
@pytest.mark.parametrize("name, numbers", [("ppo", 2 * 3712 + 32), ("sdpo", 2 * 3712), ("constraint", 3712)])
def test_a_critic_and_a_teacher_have_adapters_of_their_own_and_a_refiner_those_of_the_start(name, numbers, tmp_path):
    (tmp_path / "refine.txt").write_text("{question}{response}\n")
    constrained = SECTIONS | {"constraint": SECTIONS["constraint"] | {"template": str(tmp_path / "refine.txt")}}
    sections = CLOSED.get(name, constrained)
    recipe = recipe_of(tmp_path, sections | {"lora": LORA, "run": {"steps": 4, "seed": 3}})
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    killed(recipe, tmp_path / "again", step=2)
    assert train(recipe, f"run.output_dir={tmp_path}/again")[0] == 0
    assert_same_run(tmp_path / "again", tmp_path / "run")
    assert elements(tmp_path / "run/checkpoints/step_000004")[""] == numbers
    if name == "constraint":
        assert any("constraint/cross_entropy" in line for line in metrics(tmp_path / "run")), "no pairs"
