"""A run's checkpoints: converting and evaluating them, a full disk, and a folder that is lost."""

import json
import os
import re
import shutil
import subprocess
from fnmatch import fnmatchcase

import pytest
import torch
from safetensors.torch import load_file

from megatron_rft.commands.main import main
from megatron_rft.megatron import checkpoint
from megatron_rft.utils.checkpoint_files import complete, damage, latest
from tests.integration.tiny import ROOT, metrics, train, write_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a recipe and of its finished run."""
    folder = tmp_path_factory.mktemp("trained")
    recipe = write_recipe(folder, run={"steps": 2}, evaluation={"samples": 2}, tracking={"peak_tflops": 0.001})
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    return folder


def test_the_newest_checkpoint_becomes_what_the_run_exported(run, tmp_path, capsys):
    assert main(["convert", str(run / "run"), str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "checkpoints/step_000002 (megatron) ->" in told
    expected, found = (load_file(folder / "model.safetensors") for folder in (run / "run/export", tmp_path / "out"))
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (run / "run/export/tokenizer.json").read_bytes()


def test_every_number_in_the_log_stands_in_the_table(run):
    """docs/metrics.md has its name, unit and formula; <phase> and * match anything."""
    rows = [
        line.split("|")[1:-1] for line in (ROOT / "docs/metrics.md").read_text().splitlines() if line.startswith("| `")
    ]
    assert len(rows) > 80 and all(len(row) == 3 and row[2].strip() for row in rows)
    patterns = [re.sub(r"<\w+>", "*", name) for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    logged = {name for line in metrics(run / "run") for name in line} - {"step", "time"}
    assert {"seconds/training", "seconds/reward", "memory/training_gib", "training/mfu"} <= logged
    assert not [name for name in logged if not any(fnmatchcase(name, pattern) for pattern in patterns)]


def test_evaluate_reads_a_checkpoint_like_the_export(run, tmp_path, capsys):
    evaluate = ["evaluate", str(run / "recipe.yaml"), "evaluation.limit=4"]
    assert main([*evaluate, "--out", str(tmp_path / "hf")]) == 0
    assert main([*evaluate, "--out", str(tmp_path / "megatron"), "--model", str(run / "run/checkpoints")]) == 0
    told = [(tmp_path / kind / "test.jsonl").read_text() for kind in ("hf", "megatron")]
    assert told[0] == told[1] and len(told[0].splitlines()) == 8


def test_the_model_of_another_architecture(run, tmp_path, capsys):
    shutil.copytree(run / "model", tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"hidden_size": 64}))
    assert main(["convert", str(run / "run"), str(tmp_path / "out"), "--like", str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err
    assert "of another shape: embedding.word_embeddings.weight (8, 32), config.json says (8, 64)" in error
    assert not (tmp_path / "out").exists()


def test_a_run_whose_model_is_gone(run, tmp_path, capsys):
    shutil.copytree(run / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run/export")  # it would stand in
    recipe = tmp_path / "run/recipe.yaml"
    recipe.write_text(recipe.read_text().replace(str(run / "model"), str(tmp_path / "moved")))
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert "if it was moved, name it as `like`" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--like", str(run / "model")]) == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_disk_that_fills_up_leaves_the_checkpoint_before(run, tmp_path, capsys, asynchronous):
    """The disk has room for one checkpoint (0.44 MB), but not for two."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=700k", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("a file system of its own can be mounted by root only")
    try:
        choice = [
            f"run.output_dir={small}/run",
            "checkpoint.every=1",
            f"checkpoint.asynchronous={asynchronous}".lower(),
        ]
        assert main(["train", str(run / "recipe.yaml"), *choice]) == 3
        error = capsys.readouterr().err
        assert "the disk is full: step_000002 did not fit" in error and "step_000001 stays the newest" in error
        folder = small / "run/checkpoints"
        assert [each.name for each in folder.iterdir()] == ["step_000001"] == [latest(folder).name]
    finally:
        subprocess.run(["umount", "-l", small], check=True)


@pytest.mark.parametrize("moment", ["_save", "_write"])
@pytest.mark.parametrize("told", ["No such file or directory", "Read-only file system"])
def test_a_folder_that_is_lost_during_a_run(run, tmp_path, capsys, monkeypatch, moment, told):
    """Before the second save, or when its writer begins. With the folder back the same command goes on."""
    folder, away, read_only = tmp_path / "run/checkpoints", tmp_path / "away", told.startswith("Read")
    if read_only and subprocess.run(["mount", "--bind", tmp_path, tmp_path], capture_output=True).returncode:
        pytest.skip("a folder can be mounted read-only by root only")
    owner = checkpoint if moment == "_write" else checkpoint.Checkpointer
    function = getattr(owner, moment)

    def without_folder(*arguments):
        if any("step_000002" in str(each) for each in arguments) and read_only:
            subprocess.run(["mount", "--bind", folder, folder], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        elif any("step_000002" in str(each) for each in arguments):
            folder.rename(away)
        return function(*arguments)

    monkeypatch.setattr(owner, moment, without_folder)
    command = ["train", str(run / "recipe.yaml"), f"run.output_dir={tmp_path}/run", "checkpoint.every=1"]
    try:
        assert main(command) == 3
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=read_only, capture_output=True)
    error = capsys.readouterr().err
    left = "step_000001 stays the newest" if read_only else "no checkpoint is there now"
    assert f"error: {told}: step_000002 could not be written into {folder}; {left}. Make it exist" in error
    assert "Traceback" not in error
    monkeypatch.undo()
    if not read_only:
        shutil.rmtree(folder, ignore_errors=True)
        away.rename(folder)
    assert main(command) == 0 and "resumed after step 1" in capsys.readouterr().out
    ours, undisturbed = (path / "run/export/model.safetensors" for path in (tmp_path, run))
    assert ours.read_bytes() == undisturbed.read_bytes()


def shards(run):
    return sorted((run / "checkpoints/step_000004").glob("*.distcp"), key=lambda path: path.stat().st_size)


def flip_a_bit(run):
    content = bytearray(shards(run)[-1].read_bytes())
    content[len(content) // 2] ^= 1
    shards(run)[-1].write_bytes(content)


def cut_off(run):
    os.truncate(shards(run)[-1], 100)


@pytest.mark.parametrize(
    "harm, told",
    [
        (flip_a_bit, "has other content than was written"),
        (cut_off, "has 100 bytes instead of"),
        (lambda run: shards(run)[0].unlink(), "is missing"),
    ],
    ids=["flipped", "cut_off", "missing"],
)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, harm, told):
    """The run resumes from the one before and ends with the same metrics and weights."""
    recipe, out = write_recipe(tmp_path, run={"steps": 4}), tmp_path / "run"
    status, output = train(recipe, "--nproc", "2")
    assert status == 0 and "common state dict differs" not in output, output[-3000:]  # a warning of megatron-core
    before, weights = metrics(out), load_file(out / "export/model.safetensors")
    stored = complete(out / "checkpoints")
    assert [damage(each) for each in stored] == ["", ""]
    harm(out)
    assert damage(stored[0]) == "" and told in damage(stored[1])

    status, output = train(recipe, "--nproc", "2")
    assert status == 0, output[-3000:]
    assert "step_000004 is damaged (__" in output and told in output and "resumed after step 2" in output
    names = ("reward/mean", "policy/loss", "policy/grad_norm")
    assert [[line.get(n) for n in names] for line in metrics(out)] == [[line.get(n) for n in names] for line in before]
    again = load_file(out / "export/model.safetensors")
    assert all(torch.equal(again[name], weights[name]) for name in weights)


def test_no_checkpoint_is_intact(tmp_path):
    recipe, out = write_recipe(tmp_path, run={"steps": 4}, checkpoint={"keep": 1}), tmp_path / "run"
    assert train(recipe)[0] == 0
    cut_off(out)
    status, output = train(recipe)
    assert status == 2 and "no checkpoint in" in output and "step_000004 is damaged" in output
