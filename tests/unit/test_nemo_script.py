"""launch/nemo.py without NeMo-Run: arguments, the points of a sweep, the scripts, the exit status."""

import importlib.util
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = str(ROOT / "examples/pipo/qwen3_4b_base/grpo_pipo.yaml")
SLURM = ["--account", "a", "--partition", "p", "--workspace", "/lustre/me", "--gpus-per-node", "8"]


@pytest.fixture(scope="module")
def nemo():
    spec = importlib.util.spec_from_file_location("nemo", ROOT / "launch/nemo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_points_are_all_combinations_with_folders_of_their_own(nemo):
    args = nemo.parse([RECIPE, "run.steps=3", *SLURM, "--sweep", "pipo.window=4,8", "--sweep", "run.seed=1,2"])
    points = nemo.points(args)
    assert [point.name for point in points] == [
        f"grpo_pipo-window_{window}-seed_{seed}" for window in (4, 8) for seed in (1, 2)
    ]
    folder = "run.output_dir=runs/pipo/qwen3_4b_base/grpo_pipo/window_8-seed_1"
    assert points[2].keys == ["run.steps=3", "pipo.window=8", "run.seed=1", folder]


def test_names_and_folders_have_no_slashes_of_values(nemo):
    args = nemo.parse([RECIPE, *SLURM, "--sweep", "model.path=Qwen/Qwen3-4B,/models/a b,hub", "--sweep", "run.seed=1"])
    points = nemo.points(args)
    labels = ["path_Qwen_Qwen3-4B-seed_1", "path__models_a_b-seed_1", "path_hub-seed_1"]
    assert [point.name for point in points] == [f"grpo_pipo-{label}" for label in labels]
    assert points[0].keys[0] == "model.path=Qwen/Qwen3-4B"
    assert points[0].keys[-1] == f"run.output_dir=runs/pipo/qwen3_4b_base/grpo_pipo/{labels[0]}"


def test_without_a_sweep_the_recipe_keeps_its_folder(nemo):
    (point,) = nemo.points(nemo.parse([RECIPE, *SLURM]))
    assert point == nemo.Point("grpo_pipo", [], RECIPE)


@pytest.mark.parametrize("given, memory", [([], "80"), (["--gpu-gib", "141"], "141")])
def test_the_plan_knows_the_ranks_and_the_gpus_memory(nemo, given, memory):
    args = nemo.parse([RECIPE, "run.seed=1", *SLURM, "--nodes", "2", *given])
    plan = nemo.plan_of(args, nemo.points(args)[0], RECIPE)
    ranks = ["--nproc", "16", "--gpus-per-node", "8", "--gpu-gib", memory]
    assert plan == ["plan", RECIPE, "--for", "train", *ranks, "run.seed=1"]


def test_ranks_without_gpus_are_planned_without_their_memory(nemo):
    args = nemo.parse([RECIPE, "--local", "--nproc", "2"])
    plan = nemo.plan_of(args, nemo.points(args)[0], RECIPE)
    assert plan == ["plan", RECIPE, "--for", "train", "--nproc", "2", "--gpus-per-node", "2"]


def test_trajectories_are_planned_as_such(nemo):
    args = nemo.parse([RECIPE, "--local", "--generate"])
    assert nemo.plan_of(args, nemo.points(args)[0], RECIPE)[1:4] == [RECIPE, "--for", "generate"]


@pytest.mark.parametrize("where", ["here", "on the login node"])
def test_a_recipe_that_cannot_be_checked_brings_a_word_why(nemo, tmp_path, monkeypatch, capsys, where):
    for name, code in {"python": "echo Traceback >&2; echo ImportError: libfoo.so >&2; exit 1", "sbatch": ":"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{code}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    args = nemo.parse([RECIPE, *SLURM, "--workspace", str(tmp_path / "shared"), *["--local"] * (where == "here")])
    nemo.check(args, nemo.points(args))
    assert capsys.readouterr().err == f"not checked, for lack of an environment {where}: ImportError: libfoo.so\n"


def test_a_folder_that_is_given_wins(nemo):
    args = nemo.parse([RECIPE, "run.output_dir=/data/x", "--local", "--sweep", "run.seed=1"])
    assert nemo.points(args)[0].keys[-1] == "run.output_dir=/data/x/seed_1"


def test_keys_are_quoted_for_the_shell(nemo):
    args = nemo.parse([RECIPE, "--local", "data.prompt_template=Q: {question} 'A'"])
    script = nemo.local_script(args, nemo.points(args)[0])
    shown = script.replace("exec python -m megatron_rft", "printf '%s\\n'")
    told = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True).stdout.splitlines()
    assert told == ["train", RECIPE, "--nproc", "1", "data.prompt_template=Q: {question} 'A'"]


def test_an_evaluation_is_one_process_without_notes(nemo):
    args = nemo.parse([RECIPE, *SLURM])
    point = nemo.Point("e", ["--model", "m"], RECIPE, "evaluate")
    lines = nemo.slurm_script(args, point).splitlines()
    assert lines[-1] == "exec python -m megatron_rft evaluate examples/pipo/qwen3_4b_base/grpo_pipo.yaml --model m"
    train = nemo.slurm_script(args, nemo.points(args)[0]).splitlines()[-1]
    assert "--nproc 8" in train and train.endswith('--job /lustre/me/slurm/"$SLURM_JOB_ID"')


@pytest.mark.parametrize(
    "folder, given, lost",
    [
        ("/data/x", ["--image", "i"], True),
        ("/data/x", ["--image", "i", "--mounts", "/a,/lustre/data:/data:rw"], False),
        ("/data/x", ["--image", "i", "--mounts", "/data:/b"], True),
        ("/lustre/me/x", ["--image", "i"], False),
        ("runs/x", ["--image", "i"], False),
        ("/data/x", [], False),
    ],
)
def test_a_run_that_would_be_lost_with_its_container(nemo, folder, given, lost):
    assert nemo.lost_with_the_container(nemo.parse([RECIPE, *SLURM, *given]), Path(folder)) is lost


def test_the_batch_lines_are_bash(nemo):
    lines = nemo.batch_lines(nemo.parse([RECIPE, *SLURM]))
    subprocess.run(["bash", "-n"], input=lines, text=True, check=True)
    assert 'job=/lustre/me/slurm/"$SLURM_JOB_ID"' in lines


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere.yaml", "--local"], "there is no recipe nowhere.yaml"),
        ([RECIPE], "no account: --account, or --local"),
        ([RECIPE, *SLURM[:2]], "no partition: --partition"),
        ([RECIPE, *SLURM[:4]], "no workspace: --workspace"),
        ([RECIPE, *SLURM[:6]], "no GPUs: --gpus-per-node 8"),
        ([str(ROOT / "pyproject.toml"), *SLURM], "is not in"),
        ([RECIPE, "--local", "--sweep", "model.path=a/b,a_b"], "two jobs would be called grpo_pipo-path_a_b and share"),
        ([RECIPE, *SLURM, "--host", "login.cluster"], "--host login.cluster: write USER@HOST or USER@HOST:PORT"),
        ([RECIPE, *SLURM, "--host", "me@login", "--identity", "/no/key"], "--identity /no/key: there is no such file"),
    ],
)
def test_mistakes(nemo, capsys, arguments, words):
    assert nemo.main(arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    "found, wanted, detached, status",
    [
        ({"a": "SUCCEEDED", "b": "SUCCEEDED"}, 2, False, 0),
        ({"a": "SUCCEEDED", "b": "FAILED"}, 2, False, 1),
        ({"a": "SUCCEEDED"}, 2, False, 1),
        ({"a": "RUNNING"}, 1, False, 1),
        ({"a": "RUNNING"}, 1, True, 0),
        ({"a": "UNKNOWN"}, 1, True, 1),
        ({"a": "CANCELLED"}, 1, True, 1),
    ],
)
def test_the_verdict(nemo, found, wanted, detached, status):
    assert nemo.conclude(found, wanted, detached, dict.fromkeys(found, "/logs")) == status
