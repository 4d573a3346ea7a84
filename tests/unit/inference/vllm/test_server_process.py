import os
import signal
import subprocess
import sys

import pytest
import torch
from transformers import Qwen3Config

from megatron_rft.inference.vllm import server_process
from megatron_rft.inference.vllm.server_process import DEAF, LocalServer
from megatron_rft.utils.errors import ConfigError
from megatron_rft.utils.processes import start_helper
from tests.unit.inference.tiny import SHAPE

MODULE = """
import multiprocessing, signal, sys


def stay(queue, signalled):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # vLLM's processes have handlers of their own
    queue.put("ready")
    signalled.wait()
    queue.put("alive")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    context = multiprocessing.get_context("spawn")
    queue, signalled = context.Queue(), context.Event()
    child = context.Process(target=stay, args=(queue, signalled))
    child.start()
    print(queue.get(), child.pid, sys.argv[1:], flush=True)
    sys.stdin.read()
    signalled.set()
    print(queue.get(), flush=True)
    child.join()
"""


def test_a_server_and_its_processes_survive_the_stop_of_a_run(tmp_path):
    (tmp_path / "served.py").write_text(MODULE)
    command = [sys.executable, "-c", DEAF, "served", "--port", "1"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdin=pipe, stdout=pipe, text=True) as server:
        ready, pid, *given = server.stdout.readline().split(maxsplit=2)
        assert ready == "ready" and given == ["['--port', '1']\n"]
        for each in (server.pid, int(pid)):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                os.kill(each, number)
        server.stdin.close()
        assert server.stdout.read() == "alive\n"
    assert server.returncode == 0


def test_a_server_that_answers_but_cannot_be_used_is_ended(tmp_path, monkeypatch):
    """Nobody else would: there is no engine yet that could be closed."""
    started = []

    def spawn(*_):
        started.append(start_helper(["sleep", "600"], reap=True))
        return started[0]

    def refuse(server):
        raise ConfigError("takes no weights")

    monkeypatch.setattr(server_process, "spawn", spawn)
    monkeypatch.setattr(LocalServer, "_health", lambda server: None)
    monkeypatch.setattr(LocalServer, "_check_facts", refuse)
    with pytest.raises(ConfigError, match="takes no weights"):
        LocalServer(Qwen3Config(**SHAPE), torch.float32, tmp_path / "server.log", {}, {})
    assert started[0].returncode is not None
