"""Runs on pictures: the example in small, killed and resumed, over two ranks, and what is refused."""

import json
import os
import shutil
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from megatron_rft.commands.main import main
from megatron_rft.plan.vllm import unusable
from megatron_rft.tracking.metrics import SAMPLES_FILE
from megatron_rft.utils.files import read_json_lines
from tests.fork_server import ENVIRONMENT
from tests.integration.test_kill_and_resume import disturbed
from tests.integration.tiny import ROOT, kill, metrics, train
from tests.unit.environments.test_images import AGENT

EXAMPLE = ROOT / "examples/vision"
AGAIN = """
import base64, io
from PIL import Image
from megatron_rft.environments import Environment, Turn


class Again(Environment):
    def reset(self, prompt, seed):
        self.seed = seed

    def step(self, text):
        Image.new("RGB", (56, 56), (self.seed % 256, 9, 9)).save(file := io.BytesIO(), "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        shown = {"type": "image_url", "image_url": {"url": url}}
        return Turn([{"role": "user", "content": [shown, {"type": "text", "text": "And this?"}]}])
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    (folder / "odd.py").write_text("def odd(prompt, text):\n    return float(len(text) % 2)\n")
    (folder / "again.py").write_text(AGAIN)
    (folder / "agent.py").write_text(AGENT)
    (folder / "refine.txt").write_text("{question}\n{response}\n")
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


VLLM = ["rollout.engine=vllm", "rollout.placement=process"]
WITHOUT_VLLM = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=WITHOUT_VLLM)])
def test_a_run_that_is_killed_in_a_step_continues_bit_for_bit(made, tmp_path, engine):
    def given(out):
        more = VLLM if engine == "vllm" else []
        return options(made, tmp_path / out, "checkpoint.every=1", "run.steps=6", *more)

    status, _ = disturbed(kill, EXAMPLE / "grpo.yaml", tmp_path / "killed", *given("killed"), step=3, left=1)
    assert status != 0
    for out in ("killed", "whole"):
        status, output = train(EXAMPLE / "grpo.yaml", *given(out))
        assert status == 0, output[-3000:]
    killed, whole = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert all(torch.equal(killed[name], whole[name]) for name in whole)
    assert [line["step"] for line in metrics(tmp_path / "killed")] == [
        line["step"] for line in metrics(tmp_path / "whole")
    ]


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
        ("lora={rank: 4}", "model.vision: trained does not work with lora"),
        ("data.chat=false", "images need a chat template: set data.chat=true"),
        ("batching.pack_sequences=false", "a model that reads images needs batching.pack_sequences true"),
    ],
)
def test_what_does_not_go_with_images_is_refused(made, tmp_path, option, words):
    status, output = train(EXAMPLE / "grpo.yaml", *options(made, tmp_path / "run", *option.split("; ")))
    assert status == 2 and words in output and "Traceback" not in output, output[-2000:]


@pytest.fixture(scope="module")
def start(made):
    """The folder of a model with weights, tokenizer and image processor."""
    status, output = train(EXAMPLE / "grpo.yaml", *options(made, made / "start", "run.steps=1"))
    assert status == 0, output[-3000:]
    return made / "start/export"


BESIDE = {  # options, and a metric of each step that shows their effect
    "lora": (["lora={rank: 4}", "model.vision=frozen"], "policy/grad_norm"),
    "tower": (["lora={rank: 4, targets: [attention, vision]}", "model.vision=frozen"], "policy/grad_norm"),
    "critic": (["algorithm={name: ppo}", "critic={lr: 1e-3}"], "value/grad_norm"),
    "teacher": (["distil={teacher: START}"], "policy/distillation"),
    "static": (["constraint={kind: static, eta: 0.1}"], "policy/kl_penalty"),
    "dynamic": (
        ["constraint={kind: dynamic, eta: 0.1, temperature: 1.0, template: MADE/refine.txt}"],
        "constraint/pairs",
    ),
    "feedback": (["algorithm={name: sdpo, feedback: [sibling], max_feedback_tokens: 64}"], "sdpo/informed"),
    "process": (["rollout.placement=process"], "policy/grad_norm"),
    "environment": (
        [
            "environment={kind: own, episode: MADE/again.py:Again, max_turns: 3, processes: 1}",
            f"rollout.stop=[{', '.join('abcdefghijklmnopqrstuvwxyzABCD')}]",
            "rollout.max_response_tokens=64",
        ],
        "environment/tokens_share",
    ),
    "program": (
        [
            f"environment={{kind: program, command: [{sys.executable}, MADE/agent.py], max_turns: 9, processes: 1}}",
            f"rollout.stop=[{', '.join('abcdefghijklmnopqrstuvwxyzABCD')}]",
            "rollout.max_response_tokens=96",
            "rollout.prompts_per_step=2",  # each episode is a process
            "rollout.group_size=3",
        ],
        "environment/segments_mean",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_what_goes_with_images(made, start, tmp_path, name):
    """Resumed, the run is that of one start; two ranks learn the same."""
    given, metric = BESIDE[name]
    given = [each.replace("START", str(start)).replace("MADE", str(made)) for each in given]
    for out, more in (("whole", []), ("parts", []), ("two", ["--nproc", "2"])):
        if out == "parts":  # as if it had been killed before its last checkpoint
            later = shutil.ignore_patterns("step_000004", "export")
            shutil.copytree(tmp_path / "whole", tmp_path / out, ignore=later)
        status, output = train(EXAMPLE / "grpo.yaml", *options(made, tmp_path / out, *given, *more))
        assert status == 0 and ("resumed after step 2" in output) == (out == "parts"), output[-3000:]
    whole, parts, two = (weights(tmp_path / out) for out in ("whole", "parts", "two"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert all(torch.allclose(whole[name], two[name], atol=1e-4) for name in whole)
    assert max(line.get(metric, 0) for line in metrics(tmp_path / "whole")) > 0
    if name in ("environment", "program"):
        lines = [line for out in ("whole", "two") for line in metrics(tmp_path / out) if line["step"]]
        assert all(line["environment/turns_mean"] > 1 and line["mismatch/kl"] < 1e-9 for line in lines)
        albums = [path.name for path in (tmp_path / "whole/environment/images").iterdir()]
        assert min(albums) > "000000" and max(albums) == "000003", "those that no checkpoint needs are gone"


@torch.no_grad()
def test_adapters_of_the_tower_are_converted_and_peft_computes_with_them(made, start, tmp_path):
    """Killed in a step the run goes on with the same bits; a next one starts from its adapters."""
    out, adapters = tmp_path / "run", "lora={rank: 4, alpha: 8, targets: [attention, mlp, vision]}"
    given = [
        f"model.path={start}",
        "model.initialise=pretrained",
        "model.vision=frozen",
        "checkpoint.every=1",
        adapters,
    ]
    disturbed(kill, EXAMPLE / "grpo.yaml", out, *options(made, out, *given), step=2, left=1)
    for folder, more in ((out, []), (tmp_path / "whole", []), (tmp_path / "next", [f"lora.path={out}/adapters"])):
        status, output = train(EXAMPLE / "grpo.yaml", *options(made, folder, *given, *more))
        assert status == 0, output[-3000:]
        assert max(line["mismatch/kl"] for line in metrics(folder)[1:]) < 1e-9
    killed, whole = weights(out), weights(tmp_path / "whole")
    assert all(torch.equal(killed[name], whole[name]) for name in whole)
    for to, folder in (([], "merged"), (["--to", "peft"], "peft")):
        assert main(["convert", str(out), str(tmp_path / folder), *to]) == 0
    mine, theirs = (load_file(each / "adapter_model.safetensors") for each in (tmp_path / "peft", out / "adapters"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs) and any("visual" in name for name in mine)
    merged = load_file(tmp_path / "merged/model.safetensors")
    assert all(torch.allclose(merged[name], killed[name], atol=1e-6) for name in killed)
    model = AutoModelForImageTextToText.from_pretrained(start, dtype=torch.float32)
    ids = torch.tensor([[5, *[model.config.image_token_id] * 4, 6, 7]])
    grid = torch.tensor([[1, 4, 4]])
    pixels = torch.randn(16, 6 * model.config.vision_config.patch_size**2, generator=torch.Generator().manual_seed(0))
    seen = {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == ids[0, 1]).int()}
    plain = model(ids, **seen).logits
    found = PeftModel.from_pretrained(model, tmp_path / "peft")(ids, **seen).logits
    export = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids, **seen).logits
    assert (found - export).abs().max() < 1e-5 < 1e-3 < (found - plain).abs().max()


def qwen3_vl(made, folder, mixture=False):
    """Write the configuration of a Qwen3-VL of the size of the example's model, with its other files."""
    shutil.copytree(made / "model", folder)
    small = json.loads((folder / "config.json").read_text())
    text = small["text_config"] | {"model_type": "qwen3_vl_text", "head_dim": 32}
    text["rope_parameters"] |= {"mrope_section": [8, 4, 4]}
    vision = small["vision_config"] | {"model_type": "qwen3_vl", "num_position_embeddings": 64}
    vision |= {"deepstack_visual_indexes": [0], "patch_size": 14}
    config = {"model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"]}
    if mixture:
        config = {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"]}
        text |= {"model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
        text |= {"moe_intermediate_size": 96, "mlp_only_layers": [1]}
        vision["model_type"] = "qwen3_vl_moe_vision"
    (folder / "config.json").write_text(json.dumps(small | config | {"text_config": text, "vision_config": vision}))


@pytest.mark.slow
@WITHOUT_VLLM
@pytest.mark.parametrize(
    ("family", "placement"),
    [("qwen2_5_vl", "colocated"), ("qwen2_5_vl", "process"), ("qwen3_vl", "colocated"), ("qwen3_vl", "server")]
    + [("qwen2_5_vl", "colocated, two"), ("qwen3_vl", "server, two")],
)
def test_vllm_reads_the_same_images(made, tmp_path, family, placement):
    """The same four images in each step, between which the tower changes. `two`: an engine of two workers."""
    placement, _, two = placement.partition(", ")
    given = ["run.steps=3", "data.limit=4", "checkpoint.every=0"]
    given += ["rollout.engine=vllm", f"rollout.placement={placement}", "faults.compare_weights_every=1"]
    if family == "qwen3_vl":
        given += ["lora={rank: 4, targets: [vision]}", "model.vision=frozen"] if placement == "server" else []
        qwen3_vl(made, tmp_path / "model")
        given.append(f"model.path={tmp_path}/model")
    given += ["vllm={tensor_parallel_size: 2}"] if two else []
    ranks = ["--nproc", "2"] if two and placement == "colocated" else []
    status, output = train(EXAMPLE / "grpo.yaml", *options(made, tmp_path / "run", *given), *ranks)
    assert status == 0, output[-3000:]
    lines = [line for line in metrics(tmp_path / "run") if "mismatch/kl" in line]
    assert len(lines) == 3 and max(line["mismatch/kl"] for line in lines) < 1e-9
    assert all(
        line["policy/grad_norm"] > 0 and line["sync/tensors"] == len(weights(tmp_path / "run")) for line in lines
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=WITHOUT_VLLM)])
def test_a_mixture_that_sees(made, tmp_path, engine):
    """Its experts are those of the engine; two ranks with experts of their own learn the same."""
    qwen3_vl(made, tmp_path / "model", mixture=True)
    given = [f"model.path={tmp_path}/model", "run.steps=3", "data.limit=4", f"rollout.engine={engine}"]
    more = ["megatron.expert_model_parallel_size=2", "megatron.expert_tensor_parallel_size=1", "--nproc", "2"]
    for out, own in (("one", []), ("two", more if engine == "hf" else None)):
        if own is not None:
            status, output = train(EXAMPLE / "grpo.yaml", *options(made, tmp_path / out, *given, *own))
            assert status == 0, output[-3000:]
            lines = [line for line in metrics(tmp_path / out) if "mismatch/kl" in line]
            assert len(lines) == 3 and max(line["mismatch/kl"] for line in lines) < 1e-9
    if engine == "hf":
        one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
        assert all(torch.allclose(one[name], two[name], atol=1e-4) for name in one)


PLAYED = {"kind": "own", "max_turns": 3, "processes": 1}
STOP = [*"abcdefghijklmnopqrstuvwxyzABCD"]


@pytest.mark.slow
@WITHOUT_VLLM
@pytest.mark.parametrize("placement", ["colocated", "process", "server"])
def test_vllm_reads_images_between_turns(made, tmp_path, placement):
    given, _ = BESIDE["environment"]
    status, output = train(
        EXAMPLE / "grpo.yaml",
        *options(made, tmp_path / "run", *[each.replace("MADE", str(made)) for each in given], *VLLM),
        f"rollout.placement={placement}",
    )
    assert status == 0, output[-3000:]
    samples = [each for line in read_json_lines(tmp_path / "run" / SAMPLES_FILE) for each in line["samples"]]
    assert any(len(each["images"]) == len(each["turns"]) > 1 for each in samples), "row's and turns'"
    lines = [line for line in metrics(tmp_path / "run") if line["step"]]
    assert len(lines) == 4 and all(line["environment/turns_mean"] > 1 for line in lines)
    assert max(line["mismatch/kl"] for line in lines) < 1e-9


@pytest.fixture(scope="module")
def store(made, start):
    """The folder of a store of right and wrong responses to 12 problems, 11 of them with a picture."""
    return generated(made, start, "store", {"max_response_tokens": 8}, None)


def generated(made, start, name, rollout, environment):
    rows = (made / "train.jsonl").read_text().splitlines()[:12]
    rows[3] = json.dumps(json.loads(rows[3]) | {"image": None})
    (made / "stored.jsonl").write_text("\n".join(rows) + "\n")
    recipe = {
        "trainer": "generate",
        "run": {"output_dir": str(made / name)},
        "model": {"path": str(start), "precision": "fp32"},
        "data": {"train": str(made / "stored.jsonl"), "image_field": "image", "chat": True, "max_prompt_tokens": 64},
        "rollout": {"engine": "hf", "group_size": 8} | rollout,
        "environment": environment,
        "reward": {"kind": "own", "function": f"{made}/odd.py:odd", "maximum": 1.0},
        "generation": {"held_out": 0.2},
    }
    (made / "generate.yaml").write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "megatron_rft", "generate", str(made / "generate.yaml")]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return made / name


@pytest.mark.slow
def test_a_store_of_episodes_has_each_image_once(made, start, tmp_path):
    """Without the images of the store's folder training ends with their key."""
    environment = PLAYED | {"episode": f"{made}/again.py:Again"}
    store = generated(made, start, "played", {"max_response_tokens": 64, "stop": STOP}, environment)
    files = [path for path in (store / "environment/images/000000").iterdir() if path.suffix != ".json"]
    keys = [key for each in store.rglob("*.parquet") for key in pq.read_table(each)["shown"].to_pylist()]
    assert len({*keys} - {None}) > 20 and len(files) <= len({*keys}) + 12
    given = ["rollout.max_response_tokens=64", "batching.micro_batch_tokens=512", "evaluation.every=0"]
    for out, more in (("whole", []), ("parts", ["run.steps=2"]), ("parts", [])):
        status, output = offline(made, start, store, tmp_path / out, *given, *more)
        assert status == 0, output[-3000:]
    whole, parts = (weights(tmp_path / out) for out in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    shutil.rmtree(store / "environment/images")
    status, output = offline(made, start, store, tmp_path / "without", *given)
    assert status == 2 and "has no record of the images" in output, output[-2000:]


def offline(made, start, store, out, *more):
    recipe = {
        "trainer": "offline",
        "run": {"steps": 4},
        "model": {"path": str(start), "precision": "fp32", "vision": "trained"},
        "data": {"train": str(store), "max_prompt_tokens": 64},
        "rollout": {"engine": "hf", "max_response_tokens": 8},
        "algorithm": {"name": "fpa", "batch_sequences": 8},
        "reward": {"kind": "own", "function": f"{made}/odd.py:odd", "maximum": 1.0},
        "evaluation": {"every": 2},
        "checkpoint": {"every": 2},
    }
    (made / "offline.yaml").write_text(yaml.safe_dump(recipe))
    return train(made / "offline.yaml", f"run.output_dir={out}", *more)


def test_a_store_has_its_images_by_reference(made, start, store, tmp_path):
    shards = b"".join(path.read_bytes() for path in store.rglob("*.parquet"))
    assert len(shards) < 60_000 < len((made / "stored.jsonl").read_bytes())
    for out, more in (("whole", []), ("parts", ["run.steps=2"]), ("parts", []), ("two", ["--nproc", "2"])):
        status, output = offline(made, start, store, tmp_path / out, *more)
        assert status == 0, output[-3000:]
    whole, parts, two, before = (weights(tmp_path / out) for out in ("whole", "parts", "two", start.parent))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert all(torch.allclose(whole[name], two[name], atol=1e-4) for name in whole)
    tower = [name for name in whole if name.startswith("visual.") and name.endswith("proj.weight")]
    assert not any(torch.equal(whole[name], before[name]) for name in tower)


def test_a_store_of_other_images_is_refused(made, start, store, tmp_path):
    kept = (made / "stored.jsonl").read_text()
    rows = kept.splitlines()
    rows[5] = json.dumps(json.loads(rows[5]) | {"image": json.loads(rows[6])["image"]})
    (made / "stored.jsonl").write_text("\n".join(rows) + "\n")
    status, output = offline(made, start, store, tmp_path / "run")
    (made / "stored.jsonl").write_text(kept)
    assert status == 2 and "the images of row 6 of " in output, output[-2000:]
