"""The package from Python: a run in another process, its callbacks, and code of this session."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import megatron_rft as rft
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError, RunFailed, UserError
from tests.integration.tiny import ROOT, write_recipe


def right(prompt, text: str) -> float:
    return float(text == prompt.answer)


def broken(prompt, text):
    raise OSError("no connection")


def test_train_evaluate_and_read(tmp_path, capfd):
    recipe, seen = write_recipe(tmp_path, run={"steps": 3}), []
    assert rft.train(recipe).steps == 3
    run = rft.train(recipe, callbacks=[lambda step, metrics: seen.append((step, metrics))], run={"steps": 5})
    assert [step for step, _ in seen] == [4, 5] and seen[-1][1]["reward/mean"] == run.of("reward/mean")[1][-1]
    assert run.metrics["step"] == [0, 1, 2, 3, 4, 5] and len(run.metrics["reward/mean"]) == 6 and run.samples
    (result,) = rft.evaluate(recipe, evaluation={"samples": 2})
    assert result.name == "test" and len(result.completions) == 20
    assert "pass@1" in capfd.readouterr().out


def test_code_of_this_session_and_an_early_end(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, run={"steps": 5000})
    run = rft.train(recipe, reward={"kind": "own", "function": right}, callbacks=[lambda step, _: step >= 2])
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
    with pytest.raises(UserError, match="2 rows, but 1 responses"):
        rft.grade(rows, ["2"], right)
    with pytest.raises(ConfigError, match="reward.kind"):
        rft.grade(rows, ["2", "2"], {"kind": "maths"})


def test_the_import_is_fast():
    code = "import megatron_rft as rft, sys; rft.runs; print({'torch', 'transformers'} & set(sys.modules)); rft.train"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == "set()\n"
    assert set(rft.__all__) <= set(dir(rft)) and Path(rft.__file__).is_file()
