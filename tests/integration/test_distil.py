"""Distillation runs: a student approaches a teacher of other width, depth and vocabulary; kill and resume; itself;
several teachers, and turns with an environment."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from examples.quickstart import arithmetic
from megatron_rft.commands.main import main
from megatron_rft.conversion import hf_shapes
from megatron_rft.megatron import weights
from megatron_rft.tracking.metrics import SAMPLES_FILE
from megatron_rft.utils.files import read_json_lines
from tests.integration.test_agents import ENVIRONMENT, ROLLOUT
from tests.integration.test_kill_and_resume import assert_same_run, killed
from tests.integration.test_online_algorithms import recipe_of
from tests.integration.tiny import metrics, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distil")
    write(folder)
    return folder


def write(folder: Path, **sections: dict) -> Path:
    """The recipe of a student of 2 layers, and a teacher of 3."""
    algorithm = {"name": "distil", "teacher": str(folder / "teacher")}
    given = {"reward": {"kind": "none"}, "data": {"test": None}, "rollout": {"group_size": 4}} | sections
    recipe = recipe_of(folder, given | {"algorithm": algorithm})
    write_teacher(folder / "teacher", folder / "model")
    return recipe


def write_teacher(folder: Path, student: Path, seed: int = 5, family: str = "qwen3") -> None:
    shutil.copytree(student, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = arithmetic.qwen3_config(
        hidden_size=48, intermediate_size=64, num_hidden_layers=3, vocab_size=11, num_attention_heads=4, head_dim=16
    )
    if family == "llama":
        config = LlamaConfig(**config.to_dict() | {"model_type": family, "architectures": ["LlamaForCausalLM"]})
    config.initializer_range = 0.3
    config.save_pretrained(folder)
    lookup = weights.random_tensors(config, seed)
    save_file({name: lookup(name) for name in hf_shapes(config)}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def undisturbed(folder):
    """The folder of the student's run."""
    status, output = train(folder / "recipe.yaml")
    assert status == 0 and "rows 8 to 10 of its vocabulary" in output, output[-3000:]
    return folder / "run"


def test_the_student_approaches_the_teacher_and_resumes_exactly(folder, undisturbed, tmp_path):
    found = [line["policy/distillation"] for line in metrics(undisturbed) if "policy/distillation" in line]
    assert found[-1] < 0.7 * found[0], found
    killed(folder / "recipe.yaml", tmp_path / "run", step=3)
    status, output = train(folder / "recipe.yaml", f"run.output_dir={tmp_path}/run")
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_teacher_that_is_the_student_gives_zero_and_no_gradient(folder, undisturbed, tmp_path):
    export = undisturbed / "export"
    options = [f"model.path={export}", "model.initialise=pretrained", f"algorithm.teacher={export}", "run.steps=1"]
    status, output = train(folder / "recipe.yaml", f"run.output_dir={tmp_path}/run", *options)
    assert status == 0, output[-3000:]
    line = metrics(tmp_path / "run")[-1]
    assert abs(line["policy/distillation"]) < 1e-6 and line["policy/grad_norm"] < 1e-5, line


def test_as_a_plugin_beside_rewards_and_pipo(folder, tmp_path):
    section = f"distil={{teacher: {folder}/teacher, divergence: jsd, coefficient: 0.5}}"
    options = [
        "algorithm={name: grpo, teacher: null, mini_batch_prompts: 2}",
        "reward.kind=math",
        section,
        "pipo.window=2",
    ]
    status, output = train(folder / "recipe.yaml", f"run.output_dir={tmp_path}/run", *options)
    assert status == 0, output[-3000:]
    assert metrics(tmp_path / "run")[-1]["policy/distillation"] > 0


TRUNCATED = {"top_k": 7, "top_p": 0.75}


def kept(logits: torch.Tensor) -> torch.Tensor:
    """[R, V] the tokens that TRUNCATED keeps of the student's distribution."""
    ordered, ids = logits.topk(TRUNCATED["top_k"])
    probs = ordered.softmax(-1)
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, probs.cumsum(-1) - probs < TRUNCATED["top_p"])


@torch.no_grad()
def divergence_of(sample: dict, student, teacher, truncated: bool) -> torch.Tensor:
    """[R] KL(student || teacher) at each response token of a recorded sample, in transformers."""
    tokenizer = AutoTokenizer.from_pretrained(student.name_or_path)
    prompt = tokenizer(sample["prompt"])["input_ids"]
    ids = torch.tensor([[*prompt, *tokenizer.convert_tokens_to_ids(sample["tokens"])]])
    logits = [model(ids).logits[0, len(prompt) - 1 : -1, :8] for model in (student, teacher)]
    if truncated:
        support = kept(logits[0])
        assert 1 < support.sum(1).float().mean() < TRUNCATED["top_k"]
        logits = [each.masked_fill(~support, -1e9) for each in logits]
    ours, theirs = (each.log_softmax(-1) for each in logits)
    return (ours.exp() * (ours - theirs)).sum(-1)


@pytest.mark.parametrize("truncated", [False, True])
def test_turns_of_an_environment_are_distilled_from_the_teacher_of_their_row(truncated, tmp_path, capsys):
    """The first step's divergence is that of transformers over the tokens that the policy wrote, and over no others;
    with truncated sampling over the tokens that it kept of the vocabulary. The second teacher is of another family."""
    sections = {
        "environment": ENVIRONMENT,
        "data": {"test": None, "shuffle": False},
        "rollout": {"prompts_per_step": 2, "group_size": 1} | ROLLOUT | (TRUNCATED if truncated else {}),
    }
    recipe = write(tmp_path, **sections, run={"steps": 1, "seed": 3})
    write_teacher(tmp_path / "second", tmp_path / "model", seed=6, family="llama")
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    named = (json.dumps(row | {"kind": "ab"[i % 2]}) + "\n" for i, row in enumerate(rows))
    (tmp_path / "train.jsonl").write_text("".join(named))
    config = AutoConfig.from_pretrained(tmp_path / "model")
    student = AutoModelForCausalLM.from_config(config)
    random = weights.random_tensors(config, 3)
    student.load_state_dict({name: random(name) for name in hf_shapes(config)}, strict=False)
    student.save_pretrained(tmp_path / "model")
    teachers = {"a": tmp_path / "teacher", "b": tmp_path / "second"}
    given = f"algorithm.teacher={{a: {teachers['a']}, b: {teachers['b']}}}"
    status, output = train(recipe, given, "data.teacher_field=kind", "model.initialise=pretrained")
    assert status == 0, output[-3000:]
    (line,) = (each for each in read_json_lines(tmp_path / "run" / SAMPLES_FILE) if each["step"] == 1)
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    models = {name: AutoModelForCausalLM.from_pretrained(path) for name, path in teachers.items()}
    written, whole = [], []
    for sample in line["samples"]:
        teacher = models["ab"[sample["problem"] % 2]]
        found = divergence_of(sample, student, teacher, truncated)
        whole.append(divergence_of(sample, student, teacher, truncated=False))
        written += [found[first:last] for first, last, _ in sample["turns"] or [(0, len(found), 0)]]
    assert {sample["problem"] % 2 for sample in line["samples"]} == {0, 1} and len(written) > len(whole) == 2
    expected, other = (torch.cat(parts).mean().item() for parts in (written, whole))
    found = metrics(tmp_path / "run")[-1]["policy/distillation"]
    assert found == pytest.approx(expected, rel=1e-4) and abs(found - other) > 1e-3 * found
    assert main(["train", str(recipe), f"run.output_dir={tmp_path}/no", given, "data.teacher_field=answer"]) == 2
    assert "row 1 of data.train has '0' in 'answer', and the teachers are a, b" in capsys.readouterr().err


def test_another_tokenizer_is_refused_by_its_first_token(folder, tmp_path, capsys):
    shutil.copytree(folder / "teacher", tmp_path / "teacher")
    for name in ("tokenizer.json",):
        file = tmp_path / "teacher" / name
        file.write_text(file.read_text().replace('"0": 3', '"0": 4', 1).replace('"1": 4', '"1": 3', 1))
    arguments = [f"run.output_dir={tmp_path}/run", f"algorithm.teacher={tmp_path}/teacher"]
    assert main(["train", str(folder / "recipe.yaml"), *arguments]) == 2
    assert "another tokenizer than the model: token 3 is '1' there and '0' here" in capsys.readouterr().err
