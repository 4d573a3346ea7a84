"""The package from Python: a run in another process, its callbacks, and code of this session."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import megatron_rft as rft
from megatron_rft.commands.main import main
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import CodeError, ConfigError, DataError, RunFailed, UserError
from tests.integration.tiny import ROOT, write_recipe


def right(prompt, text: str) -> float:
    return float(text == prompt.answer)


def broken(prompt, text):
    raise OSError("no connection")


def test_train_evaluate_and_read(tmp_path, capfd):
    recipe, seen = write_recipe(tmp_path, run={"steps": 3}), []
    assert rft.train(recipe).steps == 3
    callbacks = (call for call in [lambda step, metrics: seen.append((step, metrics))])
    run = rft.train(recipe, callbacks=callbacks, run={"steps": 5})
    assert [step for step, _ in seen] == [4, 5] and seen[-1][1]["reward/mean"] == run.of("reward/mean")[1][-1]
    assert run.metrics["step"] == [0, 1, 2, 3, 4, 5] and len(run.metrics["reward/mean"]) == 6 and run.samples
    (result,) = rft.evaluate(recipe, evaluation={"samples": 2})
    assert result.name == "test" and len(result.completions) == 20
    assert "pass@1" in capfd.readouterr().out


def test_code_of_this_session_and_an_early_end(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, run={"steps": 5000})
    run = rft.train(recipe, reward=right, callbacks=[lambda step, _: np.int64(step) >= 2])
    reward = {"kind": "own", "function": right}
    assert rft.load(recipe, reward=right).reward == rft.load(recipe, reward=reward).reward
    assert 2 <= run.steps < 5000 and list((tmp_path / "run/checkpoints").iterdir())
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"held cannot be sent to the processes of a run .*%%writefile my_code.py"):

        def held(prompt, text):
            return lock

        rft.load(recipe, reward={"kind": "own", "function": held})
    with pytest.raises(ConfigError, match="right is of a Python session that has ended"):
        monkeypatch.setenv(user_code.FOLDER, str(tmp_path / "gone"))
        user_code.load("session:right", "reward.function")
    monkeypatch.undo()
    with pytest.raises(RunFailed, match="no connection"):
        rft.train(recipe, run={"output_dir": str(tmp_path / "b")}, reward={"kind": "own", "function": broken})


def test_rows_of_this_session(tmp_path, monkeypatch):
    def rows(split, limit):
        return [{"question": f"{number}", "answer": "97"} for number in range(limit or 8)]

    data = {"train": rows, "test": {"path": rows, "limit": 3}}
    recipe = rft.load(write_recipe(tmp_path, run={"steps": 1}), data=data)
    run = rft.train(recipe)
    assert run.steps == 1 and all(sample["answer"] == "97" for sample in run.samples[-1]["samples"])
    monkeypatch.setenv(user_code.FOLDER, str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="data.train: rows is of a Python session that has ended: give it again"):
        rft.plan(recipe)


def test_functions_of_one_name_stay_apart(tmp_path):
    def times(factor):
        def reward(prompt, text: str) -> float:
            return factor * float(text == prompt.answer)

        return {"kind": "own", "function": reward, "maximum": 2.0}

    recipe = write_recipe(tmp_path, run={"steps": 1})
    once, twice = (rft.load(recipe, reward=times(factor), run={"name": "1e-6"}) for factor in (1, 2))
    assert rft.train(once).name == "1e-6"
    other = rft.train(twice, run={"output_dir": str(tmp_path / "other")})
    rewards = [run.of("reward/mean")[1][-1] for run in (rft.runs.read(str(tmp_path / "run")), other)]
    assert rewards[1] == 2 * rewards[0] > 0
    assert rft.train(twice, run={"steps": 2}).steps == 2  # resumes with code of the same name, as of another session
    parts = [{"name": name, **times(factor)} for name, factor in (("a", 1), ("b", 2))]
    (score,) = rft.grade([{"answer": "2"}], ["2"], {"kind": "sum", "parts": parts})
    assert score.reward == 3


def test_a_callback_that_raises_ends_the_run(tmp_path):
    recipe, steps = write_recipe(tmp_path, run={"steps": 100000}), []

    def callback(step, metrics):
        steps.append(step)
        if step == 2:
            raise OSError("no such dashboard")

    with pytest.raises(OSError, match="no such dashboard"):
        rft.train(recipe, callbacks=[callback])
    assert steps == [0, 1, 2] and sorted((tmp_path / "run/checkpoints").glob("step_*"))
    assert rft.train(recipe, callbacks=[lambda step, _: True]).steps > 2  # nothing holds the folder


def test_arguments_of_a_wrong_type_are_refused(tmp_path):
    recipe = write_recipe(tmp_path)
    for nproc, problem in ((0, "0 is not at least 1"), ("2", "'2' is not a whole number"), (2.5, "2.5 is not a whole")):
        for function in (rft.train, rft.plan):
            with pytest.raises(ConfigError, match=f"nproc: {problem}"):
                function(recipe, nproc=nproc)
    with pytest.raises(ConfigError, match="gpu_gib: 0 is not above 0"):
        rft.plan(recipe, gpu_gib=0)
    for callbacks in (right, None, [None], [lambda step: True], [lambda step, metrics, more: True]):
        with pytest.raises(ConfigError, match="callbacks: .* is not a list of functions of step and metrics"):
            rft.train(recipe, callbacks=callbacks)
    with pytest.raises(ConfigError, match="tracking.progress: none, but callbacks follow the lines of the steps"):
        rft.train(recipe, callbacks=[right], tracking={"progress": "none"})
    with pytest.raises(ConfigError, match="recipe: 3 is neither a file's path, nor options by section"):
        rft.load(3)
    with pytest.raises(ConfigError, match="to: 'gguf' is not one of hf, megatron, peft"):
        rft.convert(tmp_path / "model", tmp_path / "out", to="gguf")
    assert rft.load(recipe, rollout={"group_size": np.int64(4)}).rollout.group_size == 4
    assert not (tmp_path / "run").exists()


def test_refusals_are_those_of_the_command_line(tmp_path):
    recipe = write_recipe(tmp_path)
    with pytest.raises(ConfigError, match=r"the call: rollout.grup_size: .* Did you mean 'group_size'"):
        rft.load(recipe, rollout={"grup_size": 2})
    with pytest.raises(ConfigError, match="3 ranks are not a multiple of TP 2"):
        rft.plan(recipe, nproc=3, megatron={"tensor_model_parallel_size": 2})
    with pytest.raises(UserError, match="trainer rl: run it with `megatron-rft train`"):
        rft.generate(recipe)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        rft.trian  # noqa: B018


def test_an_argument_is_named_in_both_interfaces(tmp_path, capsys, monkeypatch):
    recipe, out = write_recipe(tmp_path), tmp_path / "out"
    model, alone, file = str(tmp_path / "model"), tmp_path / "alone", str(recipe / "x")
    other = str(shutil.copytree(model, tmp_path / "other"))
    alone.mkdir()
    (alone / "a.distcp").touch()
    for places, options, problem in (
        ([recipe], {"model": "nope"}, "model: there is no such model folder, .*nope"),
        ([recipe], {"model": model, "like": "nope"}, "like: there is no such model folder, .*nope"),
        ([recipe], {"model": model, "like": other, "out": file}, "out: .* is not a folder. Choose another out$"),
        (["nope", out], {}, "source: there is no such model folder, .*nope"),
        ([model, out], {"like": "nope"}, "like: there is no such model folder, .*nope"),
        ([model, out], {"to": "peft"}, "to: peft needs a source that trains adapters"),
        ([alone, out], {}, "has no config.json, .* as `like`, by its folder"),
    ):
        command = "convert" if out in places else "evaluate"
        with pytest.raises(UserError, match=problem):
            getattr(rft, command)(*places, **options)
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        assert main([command, *map(str, places), *words]) == 2
        assert re.search(problem, capsys.readouterr().err.strip()), problem
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="^nproc 3: a launcher has started 2 ranks"):
        rft.train(recipe, nproc=3)


def test_ctrl_c_leaves_a_checkpoint(tmp_path):
    recipe = write_recipe(tmp_path, run={"steps": 100000})
    program = f"import megatron_rft as rft; rft.train({str(recipe)!r}, callbacks=[lambda step, _: print('at', step)])"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    next(line for line in process.stdout if line.startswith("at 1"))
    os.kill(process.pid, signal.SIGINT)
    output = process.communicate(timeout=900)[0]
    assert process.returncode == -signal.SIGINT and "stopped by SIGTERM after step" in output
    assert sorted((tmp_path / "run/checkpoints").glob("step_*"))


def test_grade():
    rows = [{"question": "1+1", "answer": "2"}, {"question": "1+2", "answer": "3"}]
    scores = rft.grade(rows, [r"\boxed{2}", r"\boxed{4}"], {"kind": "math"})
    assert [score.reward for score in scores] == [1.0, 0.0]
    assert [score.reward for score in rft.grade(rows, ["2", "2"], right)] == [1.0, 0.0]
    assert [score.reward for score in rft.grade([{"answer": "so\n#### 18"}], [r"\boxed{18}"], {"kind": "math"})] == [
        1.0
    ]
    for wrong, problem in (([{"answer": {}}], "'answer' is an object"), (["2"], "a row has named fields")):
        with pytest.raises(DataError, match=rf"rows\[0\]: .*{problem}"):
            rft.grade(wrong, ["2"], right)
    with pytest.raises(ConfigError, match=r"responses\[1\]: null is not text"):
        rft.grade(rows, ["2", None], right)
    with pytest.raises(ConfigError, match="reward: null is not a section of options"):
        rft.grade(rows, ["2", "2"], None)
    with pytest.raises(RunFailed, match="the reward is nan on response 0 to problem 0"):
        rft.grade(rows, ["2", "2"], lambda prompt, text: float("nan"))
    with pytest.raises(CodeError, match="partial .*returned 'good': return a number or a Score"):
        rft.grade(rows, ["2", "2"], partial(lambda word, prompt, text: word, "good"))
    with pytest.raises(UserError, match="2 rows, but 1 responses"):
        rft.grade(rows, ["2"], right)
    with pytest.raises(ConfigError, match="reward.kind"):
        rft.grade(rows, ["2", "2"], {"kind": "maths"})


def test_the_import_is_fast():
    code = "import megatron_rft as rft, sys; rft.runs; print({'torch', 'transformers'} & set(sys.modules)); rft.train"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == "set()\n"
    assert set(rft.__all__) <= set(dir(rft)) and Path(rft.__file__).is_file()
