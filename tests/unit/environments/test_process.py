"""What an environment has started ends with its process, and its process with the run."""

import os
import signal
import subprocess
import sys
import time

import pytest

from megatron_rft.environments.process import EnvironmentProcesses, EpisodeFailed, shown
from megatron_rft.responses import Prompt
from megatron_rft.utils.end_with_parent import children
from megatron_rft.utils.processes import process_state

OPENS = """
import subprocess
from megatron_rft.environments import Environment

class Opens(Environment):
    def reset(self, prompt, seed):
        return str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)  # as a browser does

    def step(self, text): ...
"""
RUN = """
import time
from pathlib import Path
from tests.unit.environments.test_process import opened

environment, pid = opened(Path("."))
print(pid, flush=True)
time.sleep(600)
"""


def opened(folder):
    """An episode's environment, and the pid of what it has started."""
    (folder / "opens.py").write_text(OPENS)
    processes = EnvironmentProcesses({"kind": "own", "episode": f"{folder}/opens.py:Opens"}, 1, 60.0, folder / "log")
    environment = processes.new()
    return environment, int(environment.ask("reset", prompt=shown(Prompt(0, (), "", "")), seed=0))


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while process_state(pid) not in ("", "Z"):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("how", ["closed", "the worker is killed", "the run is killed"])
def test_nothing_that_an_environment_has_started_is_left(how, tmp_path):
    if how == "the run is killed":
        command = [sys.executable, "-c", RUN]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env=environment) as run:
            pid = int(run.stdout.readline())
            run.kill()
        assert ends(pid)
        return
    environment, pid = opened(tmp_path)
    assert process_state(pid) not in ("", "Z")
    if how == "closed":
        environment.process.close()
    else:
        (worker,) = children(environment.process.process.pid)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(EpisodeFailed, match="was killed by SIGKILL"):
            environment.ask("step", text="")
    assert ends(pid)
