"""Every program of attacks.py in the sandbox: none escapes, none is rewarded, none leaves a process or a file."""

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_rft.records import Prompt, Score
from megatron_rft.rewards.code import NONE_PASSED
from tests.unit.rewards import attacks
from tests.unit.rewards.test_sandbox import code_reward

MARKER = "megatron_rft_attack"
TOKEN = "TOKEN-8271828459045-of-the-test"
pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the attacks use numbers of x86_64's calls")


FOLDERS = tuple(folder for folder in ("/tmp", "/dev/shm", "/var/tmp", "/usr") if os.path.isdir(folder))


def left_in(folder: str | Path) -> set[str]:
    """Names of files that a program created, and of core dumps."""
    return {name for name in os.listdir(folder) if re.match(rf"{MARKER}|core(\.\d+)?$", name)}


@pytest.fixture(scope="module")
def outside(tmp_path_factory) -> Iterator[dict]:
    """Real things that the programs must not reach: a file, a process, two listening sockets, a variable."""
    canary = tmp_path_factory.mktemp("outside") / "canary"
    canary.write_text(TOKEN)
    for folder in [canary, *canary.parents][:-1]:
        if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(0o755 if folder.is_dir() else 0o666)  # it is the sandbox that hides it, not its mode
    before = {folder: left_in(folder) for folder in FOLDERS}
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.environ["MEGATRON_RFT_TEST_SECRET"] = TOKEN
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        name = f"{MARKER}_{os.getpid()}"  # the machine's: another's tests may be at it
        abstract.bind(f"\0{name}")
        abstract.listen()
        yield {
            "canary": canary,
            "pid": victim.pid,
            "port": server.getsockname()[1],
            "name": name,
            "marker": MARKER,
            "token": TOKEN,
            "victim": victim,
            "before": before,
        }
    del os.environ["MEGATRON_RFT_TEST_SECRET"]
    victim.kill()
    victim.wait()


def filled(source: str, outside: dict) -> str:
    for name, value in outside.items():
        source = source.replace(f"{{{name}}}", str(value))
    return source


def sandboxed() -> set[psutil.Process]:
    """The servers, their parents, and the cells that are forked from them."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if any("server.py" in word for word in process.cmdline()):
                found.add(process)
    return found


@pytest.fixture(scope="module")
def scores(outside) -> Iterator[dict[str, Score]]:
    """All programs at once, four at a time; then the sandbox is closed and its processes are gone."""
    others = sandboxed()
    reward = code_reward(timeout_s=1.0, memory_mb=512, workers=4, row_timeout_s=4.0)
    script = {"kind": "stdin", "inputs": ["1", "2"], "outputs": ["ESCAPED"] * 2}
    stolen = {"kind": "stdin", "inputs": ["1", "2"], "outputs": [TOKEN] * 2}
    module = {"kind": "assert", "code": filled(attacks.ASSERTS, outside), "setup": filled(attacks.SETUP, outside)}
    programs = {name: (source, module) for name, source in attacks.MODULES.items()}
    for name, source in attacks.SCRIPTS.items():
        programs[name] = (source, stolen if name in attacks.STEAL else script)
    prompts = [Prompt(i, (1,), "", json.dumps(tests)) for i, (_, tests) in enumerate(programs.values())]
    graded = reward(prompts, [f"```python\n{filled(source, outside)}\n```" for source, _ in programs.values()])
    servers = 4 * 2  # each with its parent
    deadline = time.monotonic() + 600
    while len(cells := sandboxed() - others) > servers:
        assert time.monotonic() < deadline, "cells outlive their programs"
        time.sleep(0.1)
    assert cells
    reward.close()
    assert not psutil.wait_procs(cells, timeout=600)[1], "processes outlive the sandbox"
    yield dict(zip(programs, graded, strict=True))


@pytest.mark.parametrize("name", [*attacks.SCRIPTS, *attacks.MODULES])
def test_no_attack_is_rewarded(name, scores):
    score = scores[name]
    assert score.error is None, "an attack must not pass for a fault of the grader"
    assert score.reward <= NONE_PASSED and not score.correct, score


def test_nothing_is_left_outside(scores, outside):
    assert outside["victim"].poll() is None, "a process outside was killed"
    assert outside["canary"].read_text() == TOKEN
    for folder in FOLDERS:
        assert not left_in(folder) - outside["before"][folder]
    assert not left_in(outside["canary"].parent)


@pytest.mark.parametrize("name", attacks.PROVEN)
def test_the_attack_works_without_a_sandbox(name, outside):
    command = [sys.executable, "-c", filled(attacks.SCRIPTS[name], outside)]
    output = subprocess.run(command, capture_output=True, text=True, cwd="/").stdout
    assert (TOKEN if name in attacks.STEAL else "ESCAPED") in output


def test_there_are_enough():
    assert len(attacks.SCRIPTS) + len(attacks.MODULES) >= 40
