"""Stop signals to a whole run that come from `timeout`, from a terminal, during an evaluation or an export, or with
vLLM: the run saves and ends with status 75, and a resumed one equals an undisturbed one."""

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_rft.launching.hangs import position_file
from megatron_rft.launching.ranks import ranks_folder
from megatron_rft.plan.vllm import unusable
from megatron_rft.utils.position import Position, read
from megatron_rft.utils.processes import FIRST_INTERRUPT
from tests.fork_server import ENVIRONMENT
from tests.integration.test_kill_and_resume import (
    ONE_INTERRUPT,
    assert_same_run,
    assert_same_weights,
    disturbed,
    stop_all,
)
from tests.integration.tiny import PROGRAM, freeze, kill, metrics, start, thaw, train, wait_until, write_recipe

STEPS = 14  # so many that none of them is the last when a signal comes


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def undisturbed(tmp_path_factory, request):
    """(recipe, arguments, the run's folder) of a run that evaluates after each step."""
    folder, ranks = tmp_path_factory.mktemp("undisturbed"), ["--nproc", "2"] if request.param == 2 else []
    data = {"validation": str(folder / "test.jsonl"), "max_prompt_tokens": 8}
    recipe = write_recipe(folder, run={"steps": STEPS, "seed": 3}, data=data, evaluation={"every": 1})
    status, output = train(recipe, *ranks)
    assert status == 0, output[-3000:]
    return recipe, ranks, folder / "run"


def resumes(recipe: Path, out: Path, expected: Path, *arguments: str) -> None:
    assert not list(out.glob("checkpoints/*.partial"))
    status, output = train(recipe, f"run.output_dir={out}", *arguments)
    assert status == 0 and "resumed after step" in output, output[-3000:]
    assert_same_run(out, expected)


@pytest.mark.slow
def test_timeout(undisturbed, tmp_path):
    """SIGALRM is what `timeout` gets from its own timer. It signals its child and then its group."""
    recipe, ranks, expected = undisturbed
    out, name = tmp_path / "run", "INT" if ranks else "TERM"
    timeout = ("timeout", "--preserve-status", "-s", name, "10000")

    def begin(recipe: Path, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*timeout, sys.executable, ONE_INTERRUPT, "train", str(recipe), *arguments],
            env=os.environ | ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    status, output = disturbed(
        lambda process: process.send_signal(signal.SIGALRM), recipe, out, *ranks, step=2, left=2, begin=begin
    )
    assert status == 75 and "stopped by SIG" in output, output[-3000:]
    resumes(recipe, out, expected, *ranks)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal(undisturbed, tmp_path):
    recipe, ranks, expected = undisturbed
    out, terminals = tmp_path / "run", []

    def begin(recipe: Path, *arguments: str) -> subprocess.Popen:
        terminal, line = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, *PROGRAM, "train", str(recipe), *arguments],
            env=os.environ | ENVIRONMENT,
            stdin=line,
            stdout=line,
            stderr=line,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(line)
        told: list[bytes] = []
        reader = threading.Thread(target=read_terminal, args=(terminal, told))
        reader.start()
        terminals.append((terminal, told, reader))
        return process

    def press(_process: subprocess.Popen) -> None:
        os.write(terminals[-1][0], b"\x03")

    status, _ = disturbed(press, recipe, out, *ranks, step=2, left=2, begin=begin)
    _, told, reader = terminals[-1]
    reader.join()
    output = b"".join(told).decode().replace("\r\n", "\n")
    assert status == 75 and output.count(FIRST_INTERRUPT) == 1 and "Traceback" not in output, output[-3000:]
    resumes(recipe, out, expected, *ranks)


def read_terminal(terminal: int, into: list[bytes]) -> None:
    """Until the last process that has it open ends, which is an error of Linux."""
    with open(terminal, "rb", buffering=0) as file:
        try:
            while chunk := file.read(4096):
                into.append(chunk)
        except OSError:
            pass


def stopped_while(
    condition: Callable[[Position, Path], bool],
    recipe: Path,
    out: Path,
    *arguments: str,
) -> tuple[int, str]:
    """Status and output of a run whose processes all get SIGTERM twice while a condition holds for its rank 0. They
    are frozen to make sure of it. If the condition is missed, the run is started again."""

    def holds() -> bool:
        here = read(position_file(ranks_folder(str(out)), 0), 0)
        return here is not None and condition(here, out)

    for _ in range(5):
        process = start(recipe, f"run.output_dir={out}", *arguments)
        while wait_until(holds, process) and freeze(process):
            if holds():
                stop_all(process, signal.SIGTERM)
                output, _ = process.communicate(timeout=900)
                return process.returncode, output
            thaw(process)
        kill(process)
        process.communicate()
        shutil.rmtree(out)
    pytest.fail("no run could be signalled there, in five")


def is_in(phase: str, step: int) -> Callable[[Position, Path], bool]:
    return lambda here, out: here.phase == phase and here.step == step


@pytest.mark.slow
@pytest.mark.parametrize("step", [0])
def test_during_an_evaluation(undisturbed, tmp_path, step):
    recipe, ranks, expected = undisturbed
    out = tmp_path / "run"
    status, output = stopped_while(is_in("evaluation", step), recipe, out, *ranks)
    assert status == 75 and "stopped by SIGTERM after step" in output, output[-3000:]
    resumes(recipe, out, expected, *ranks)


@pytest.mark.slow
def test_during_an_export(undisturbed, tmp_path):
    """It is the last thing that a run does, so it is finished, and nothing is left to resume. An export copies the
    files of the tokenizer: who opens one on which another process has a lease waits in the kernel."""
    recipe, ranks, expected = undisturbed
    out, copied = tmp_path / "run", recipe.parent / "model/video_preprocessor_config.json"
    shutil.copytree(expected, out, ignore=shutil.ignore_patterns("export"))
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # tells the holder of a lease that somebody waits
    with copied.open("w") as file:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        process = start(recipe, f"run.output_dir={out}", *ranks)
        assert wait_until(lambda: fcntl.fcntl(file, fcntl.F_GETLEASE) != fcntl.F_WRLCK, process)
        partial = (out / ".export.partial").exists()
        stop_all(process, signal.SIGTERM)
    signal.signal(signal.SIGIO, before)
    output, _ = process.communicate(timeout=900)
    assert partial and not (out / ".export.partial").exists()
    assert process.returncode == 0 and "model in Hugging Face format" in output, output[-3000:]
    assert_same_run(out, expected)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """(recipe, the run's folder) with vLLM in the rank."""
    if unusable():
        pytest.skip(str(unusable()))
    folder = tmp_path_factory.mktemp("vllm")
    rollout = {"engine": "vllm", "max_response_tokens": 6}
    recipe = write_recipe(folder, rollout=rollout, pipo={"window": 2, "learning_rate": 1e-2})
    config = folder / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"head_dim": 32}))
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    return recipe, folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["colocated"])
def test_while_vllm_generates(vllm, tmp_path, placement):
    """Its own processes get the signal too, and none of them is lost."""
    recipe, expected = vllm
    out, option = tmp_path / "run", f"rollout.placement={placement}"
    status, output = stopped_while(is_in("generation", 3), recipe, out, option)
    assert status == 75 and "stopped by SIGTERM after step 3;" in output, output[-3000:]
    status, output = train(recipe, option, f"run.output_dir={out}")
    assert status == 0 and "resumed after step 3" in output, output[-3000:]
    assert not any(line.get("faults/engine_restarts") for line in metrics(out))
    assert_same_weights(out, expected)
