"""Whole offline runs: generate trajectories, train methods on them, kill and resume, with and without a cache; and
refused recipes."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_rft.data.trajectories import read
from megatron_rft.tracking.metrics import NOTES_FILE
from megatron_rft.utils.files import digest, read_json_lines
from tests.fork_server import ENVIRONMENT
from tests.integration import test_agents
from tests.integration.test_distil import write_teacher
from tests.integration.test_kill_and_resume import assert_same_run, killed, wait_for_step
from tests.integration.tiny import kill, metrics, start, train, write_data, write_model

pytestmark = pytest.mark.slow
GENERATE = {
    "trainer": "generate",
    "run": {"seed": 42},
    "rollout": {"engine": "hf", "group_size": 8, "max_response_tokens": 2, "temperature": 0.7},
    "generation": {"problems_per_shard": 8, "held_out": 0.2},
}
OFFLINE = {
    "trainer": "offline",
    "run": {"steps": 12, "seed": 3},
    "rollout": {"engine": "hf", "max_response_tokens": 2},
    "batching": {"micro_batch_tokens": 64},
    "algorithm": {"name": "fpa", "batch_sequences": 16, "part_norms_every": 5, "kl_coefficient": 0.1},
    "optimizer": {"lr": 1e-2, "clip_grad": 10.0},
    "evaluation": {"every": 4, "samples": 2},
    "checkpoint": {"every": 3},
}


def write(folder: Path, name: str, recipe: dict, data: str, out: str) -> None:
    """Write a recipe on the data in `folder`, with its output there."""
    own = {
        "model": {"path": str(folder / "model"), "precision": "fp32"},
        "data": {"train": str(folder / data), "max_prompt_tokens": 8},
        "run": recipe["run"] | {"output_dir": str(folder / out)},
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe | own))


def generate(recipe: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rft", "generate", str(recipe), *arguments],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("offline"))


def make_store(folder: Path) -> Path:
    """Make a folder with a model, recipes, and a complete store written by two workers."""
    write_model(folder / "model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model")).save_pretrained(folder / "model")
    write_data(folder / "train.jsonl", 64)
    write(folder, "generate", GENERATE, "train.jsonl", "store")
    write(folder, "offline", OFFLINE, "store", "run")
    status, output = generate(folder / "generate.yaml", "--nproc", "2")
    assert status == 0 and "512 responses to 64 problems" in output, output[-3000:]
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder):
    status, output = train(folder / "offline.yaml", forked=False)
    assert status == 0, output[-3000:]
    assert [line["step"] for line in metrics(folder / "run")] == list(range(13))
    return folder / "run"


def content(store: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in (*store.glob("shards/*"), store / "index.json")}


def test_a_killed_generation_goes_on_and_one_worker_writes_what_two_do(folder, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(folder / "store", store)
    for name in ("shards/000002.parquet", "shards/000005.parquet", "index.json"):
        (store / name).unlink()
    (store / "shards/000002.123.partial").write_bytes(b"torn")  # what a killed worker leaves
    status, output = generate(folder / "generate.yaml", f"run.output_dir={store}")
    assert status == 0 and output.count("responses, ") == 2, output[-3000:]
    (store / "shards/000002.123.partial").unlink()
    assert content(store) == content(folder / "store")
    status, output = generate(folder / "generate.yaml", f"run.output_dir={store}", "run.seed=7")
    assert status == 2 and "run.seed: 42 there, 7 now" in output


def test_a_generation_does_not_go_on_with_other_data(folder, tmp_path):
    """The shards that are there have the rows of the data as it was."""
    for name in ("store", "model"):
        shutil.copytree(folder / name, tmp_path / name)
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[1:]))
    write(tmp_path, "generate", GENERATE, "train.jsonl", "store")
    shutil.copy(tmp_path / "generate.yaml", tmp_path / "store/recipe.yaml")
    (tmp_path / "store/shards/000005.parquet").unlink()
    status, output = generate(tmp_path / "generate.yaml")
    assert status == 2 and "data.train: it has changed since" in output, output[-3000:]
    (tmp_path / "train.jsonl").write_text("".join(lines))
    status, output = generate(tmp_path / "generate.yaml")
    assert status == 0 and "shard 1 of 8" not in output, output[-3000:]


def test_killed_and_resumed_it_is_the_same_run(undisturbed, folder, tmp_path):
    out, rng, resumed = tmp_path / "run", random.Random(3), 0
    for step in (2, 7):
        process = start(folder / "offline.yaml", f"run.output_dir={out}")
        wait_for_step(out, process, step)
        time.sleep(rng.uniform(0, 0.5))
        kill(process)
        resumed += "resumed after step" in process.communicate()[0]
    status, output = train(folder / "offline.yaml", f"run.output_dir={out}")
    assert status == 0, output[-3000:]
    assert resumed + ("resumed after step" in output) >= 1, "no start found a checkpoint: this shows nothing"
    assert_same_run(out, undisturbed)


def test_validation_on_other_problems_than_the_held_out_ones(folder, tmp_path):
    write_data(tmp_path / "own.jsonl", 5)
    options = [f"data.validation={tmp_path}/own.jsonl", "run.steps=2", "evaluation.every=2"]
    status, output = train(folder / "offline.yaml", f"run.output_dir={tmp_path}/run", *options)
    assert status == 0, output[-3000:]
    (result,) = json.loads((tmp_path / "run/evaluation/validation_step_000002/results.json").read_text())
    assert result["problems"] == 5  # 12 are held out


def test_distillation_on_the_trajectories(folder, tmp_path):
    """The teacher follows from the problem's answer."""
    for name, seed in {"first": 5, "second": 6}.items():
        write_teacher(tmp_path / name, folder / "model", seed)
    teachers = dict.fromkeys("013", f"{tmp_path}/first") | dict.fromkeys("24", f"{tmp_path}/second")
    algorithm = {"name": "offline_distil", "teacher": teachers, "batch_sequences": 16}
    write(folder, "distil", OFFLINE | {"algorithm": algorithm, "evaluation": {}}, "store", "distilled")
    recipe = yaml.safe_load((folder / "distil.yaml").read_text())
    recipe["data"]["teacher_field"] = "answer"
    (folder / "distil.yaml").write_text(yaml.safe_dump(recipe))
    status, output = train(folder / "distil.yaml")
    assert status == 0 and "rows 8 to 10 of its vocabulary" in output, output[-3000:]
    found = [line["policy/distillation"] for line in metrics(folder / "distilled")]
    assert found[-1] < 0.7 * found[0], found
    killed(folder / "distil.yaml", tmp_path / "again", step=7)
    status, output = train(folder / "distil.yaml", f"run.output_dir={tmp_path}/again")
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert_same_run(tmp_path / "again", folder / "distilled")


def test_the_best_adapters_are_exported(folder, tmp_path):
    options = ["lora={rank: 4, alpha: 8}", "run.steps=4", "evaluation.every=1", "checkpoint.every=0"]
    status, output = train(folder / "offline.yaml", f"run.output_dir={tmp_path}/run", *options)
    assert status == 0 and "3712 parameters are trained" in output, output[-3000:]
    folders = tmp_path / "run/best", tmp_path / "run/export", folder / "model"
    best, export, base = (load_file(path / "model.safetensors") for path in folders)
    assert all(".lora_" in name for name in best) and len(best) == 28
    for name, weight in base.items():
        a, b = (best.get(name.replace("weight", f"lora_{part}.weight")) for part in "AB")
        merged = weight if a is None else weight + 2 * b @ a
        assert torch.allclose(export[name], merged, atol=1e-6) and (a is None or not torch.equal(export[name], weight))


def test_cached_hidden_states_train_the_same_model(folder, tmp_path):
    """Bit for bit without shared prompts, which change the rounding. They are computed once."""
    outputs = []
    for name, options in (("run", ["algorithm.reference=cached_hidden"]), ("recomputed", [])):
        for steps in (["run.steps=2"], []):
            given = [f"run.output_dir={tmp_path}/{name}", "batching.share_prompts=off", *options, *steps]
            status, output = train(folder / "offline.yaml", *given)
            assert status == 0, output[-3000:]
            outputs.append(output)
    assert ["reference cache:" in output for output in outputs] == [True, False, False, False]
    assert "resumed after step 2" in outputs[1]
    ours, theirs = (tmp_path / run / "export/model.safetensors" for run in ("run", "recomputed"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_weights_that_saturate_have_their_alarm(folder, tmp_path):
    """Far ahead of the policy all weights are 0 or 1. `tracking.alarms` turns every alarm off."""
    options = ["algorithm.extrapolation=10", "algorithm.kl_coefficient=null", "algorithm.part_norms_every=0"]
    options += ["run.steps=32", "evaluation=null", "checkpoint.every=0"]
    counts = []
    for alarms in ("true", "false"):
        run = tmp_path / alarms
        status, output = train(folder / "offline.yaml", f"run.output_dir={run}", f"tracking.alarms={alarms}", *options)
        assert status == 0, output[-3000:]
        counts.append(sum("FPA's weights" in note["note"] for note in read_json_lines(run / NOTES_FILE)))
    assert counts == [1, 0], [line.get("dynamics/future_weight_saturated") for line in metrics(run)]


def test_patience_ends_a_run_and_the_best_model_is_exported(folder, tmp_path):
    options = ["evaluation.every=1", "evaluation.patience=2", "run.steps=40", "optimizer.lr=1e-7"]
    options += [f"run.output_dir={tmp_path}/run", f"data.test={folder}/train.jsonl", "data.test.limit=4"]
    status, output = train(folder / "offline.yaml", *options)
    assert status == 0, output[-3000:]
    lines = [line for line in metrics(tmp_path / "run") if line["step"]]
    accuracies = [line["evaluation/pass@1"] for line in lines]
    best = accuracies.index(max(accuracies))
    assert len(lines) == best + 3 and f"that of step {best + 1}" in output
    ours, kept = (tmp_path / "run" / name / "model.safetensors" for name in ("export", "best"))
    assert ours.read_bytes() == kept.read_bytes()
    shutil.rmtree(tmp_path / "run/evaluation" / (last := f"test_step_{len(lines):06d}"))  # killed before the last test
    status, output = train(folder / "offline.yaml", *options)
    assert status == 0, output[-3000:]
    assert sorted(path.name for path in (tmp_path / "run/evaluation").glob("test*")) == ["test_step_000000", last]


def write_one_sided(store: Path, out: Path) -> None:
    """Write a store in which every answer is right, as another program may do."""
    shutil.copytree(store, out, dirs_exist_ok=True)
    index = json.loads((out / "index.json").read_text())
    for name in index["shards"]:
        table = pq.read_table(out / "shards" / name)
        right = pa.array([1] * len(table), pa.int8())
        pq.write_table(table.set_column(table.schema.get_field_index("reward"), "reward", right), out / "shards" / name)
        index["shards"][name] = digest(out / "shards" / name)["sha256"]
    (out / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    "option,message",
    [
        ("data.train={folder}/torn", "is not a complete trajectory store"),
        ("data.train={folder}/missing", "there are no trajectories yet"),
        ("data.train={folder}/one_sided", "no problem has a right and a wrong answer"),
        ("model.tokenizer={folder}/tokenizer", "tokens of another tokenizer"),
        ("data.max_prompt_tokens=3 batching.micro_batch_tokens=4", "does not fit 4"),
    ],
)
def test_refused_before_the_model_is_built(folder, tmp_path, option, message):
    (folder / "torn" / "shards").mkdir(parents=True, exist_ok=True)
    write_one_sided(folder / "store", folder / "one_sided")
    shutil.copytree(folder / "model", folder / "tokenizer", dirs_exist_ok=True)
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"normalizer": null', '"normalizer": {"type": "Lowercase"}'))
    out = f"run.output_dir={tmp_path}/run"
    status, output = train(folder / "offline.yaml", out, *option.format(folder=folder).split(), "algorithm.name=rpo",
                           "algorithm.kl_coefficient=null")  # fmt: skip
    assert status == 2 and message in output, output[-3000:]
    assert "step  0" not in output


def test_stored_episodes_train_fpa(tmp_path):
    """Only the policy's tokens are trained on, and the held-out problems are played."""
    torch.manual_seed(0)
    write_model(tmp_path / "model")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model")).save_pretrained(tmp_path / "model")
    write_data(tmp_path / "train.jsonl", 32)
    played = {"environment": test_agents.ENVIRONMENT | {"episode": f"{test_agents.WORLD}:Opened"}}
    recipe = GENERATE | played | {"rollout": GENERATE["rollout"] | test_agents.ROLLOUT}
    write(tmp_path, "generate", recipe, "train.jsonl", "store")
    status, output = generate(tmp_path / "generate.yaml")
    assert status == 0, output[-3000:]
    stored = read(tmp_path / "store")
    batch, theirs = stored.train, stored.train.response_mask == 0
    assert 0 < theirs.sum() < 0.4 * len(theirs)
    assert set(batch.response_ids[theirs].tolist()) <= {3, 4, 5}, "the world's digits"
    assert all(len(prompt.token_ids) == len(prompt.text) for prompt in stored.held_out), "without its first message"
    offline = {"run": {"steps": 2, "seed": 3}, "evaluation": {"every": 2}, "checkpoint": {"every": 0}}
    offline = OFFLINE | played | offline | {"rollout": {"engine": "hf"} | test_agents.ROLLOUT}
    write(tmp_path, "offline", offline, "store", "run")
    status, output = train(tmp_path / "offline.yaml")
    assert status == 0, output[-3000:]
    assert metrics(tmp_path / "run")[-1]["dynamics/weight_correct"] > 0
    status, output = train(tmp_path / "offline.yaml", "environment=null", f"run.output_dir={tmp_path}/other")
    assert status == 2 and "there is none, and the trajectories in" in output, output[-3000:]
