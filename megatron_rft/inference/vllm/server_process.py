"""Starts a vLLM server on this machine, and restarts it when it is lost."""

import os
import secrets
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from megatron_rft.conversion.folder import load_config
from megatron_rft.families.towers import sees
from megatron_rft.inference.process import last_lines
from megatron_rft.inference.vllm import token_check
from megatron_rft.inference.vllm.arguments import RUNNER, cache_bytes, command, save_config
from megatron_rft.inference.vllm.server_client import ServerEngine, wait_until_ready
from megatron_rft.utils.errors import RunFailed
from megatron_rft.utils.processes import end_reaper, reserved_port, start_helper

CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # else the first computation of log-probs compiles C++ for 10 s
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
# Runs a module like `python -m`, deaf to the signals that stop a run: the start of multiprocessing's resource tracker
# unblocks SIGTERM and SIGINT, and vLLM handles them.
DEAF = """
import runpy, signal, sys
from multiprocessing.resource_tracker import ensure_running
ensure_running()
signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def spawn(
    model: Path,
    dtype: torch.dtype,
    port: int,
    host: str,
    arguments: dict[str, Any],
    environment: dict[str, str],
    log: Path,
) -> subprocess.Popen:
    """Start a server that ends with this process. `arguments`: vLLM's max_model_len, max_num_seqs and others."""
    config = load_config(model)
    if not torch.cuda.is_available():
        needs = arguments["max_model_len"], arguments["max_num_seqs"], arguments.get("tensor_parallel_size", 1)
        room = cache_bytes(config, dtype, *needs)
        arguments = {"kv_cache_memory_bytes": room} | arguments
        environment = CPU_ENVIRONMENT | environment
    python, _, *module = command(str(model), dtype, port, host, arguments, sees(config))
    environment = RUNNER | os.environ | {"VLLM_SERVER_DEV_MODE": "1"} | environment
    return start_helper([python, "-c", DEAF, *module], reap=True, log=log, env=environment)


def wait_for(process: subprocess.Popen, ask: Callable[[], None], limit_s: float, name: str, log: Path) -> None:
    """Wait until the server answers to `ask`.

    Raises:
        RunFailed: the process has ended, or does not answer in time. The message has the last lines of its log.
    """
    try:
        wait_until_ready(ask, limit_s, process)
    except RunFailed:
        status = process.poll()
        how = f"was not ready in {limit_s:g} s" if status is None else f"ended with status {status} before it was ready"
        raise RunFailed(f"{name} {how}; its log ends:\n{last_lines(log)}") from None


class LocalServer(ServerEngine):
    """A server of the run, on a free port of this machine. It ends with this process."""

    def __init__(
        self,
        config: PreTrainedConfig,
        dtype: torch.dtype,
        log: Path,
        environment: dict[str, str],
        arguments: dict[str, Any],
        **options: Any,
    ):
        """`log`: the file for the server's output; the model's configuration goes into a folder beside it. `arguments`:
        those of `spawn`. `options`: the other ones of ServerEngine."""
        token = os.environ.get(token_check.VARIABLE) or secrets.token_urlsafe(24)
        self.environment = environment | {token_check.VARIABLE: token}
        self.log, self.model = log, log.with_name(f"{log.stem}_model")
        save_config(config, self.model)
        self.arguments = arguments
        self.process: subprocess.Popen | None = None
        header = token_check.header(self.environment)
        super().__init__("http://127.0.0.1", config, dtype, authorization=header, **options)

    def start(self) -> None:
        self._kill()
        self.port = reserved_port()
        port = self.port.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.name = self.log.stem
        self.process = spawn(self.model, self.dtype, port, "127.0.0.1", self.arguments, self.environment, self.log)
        try:
            super().start()
        except BaseException:  # also if it answers, but cannot be used: nobody would close it
            self._kill()
            raise

    def _wait_until_ready(self) -> None:
        wait_for(self.process, self._health, self.start_timeout_s, self.name, self.log)

    def close(self) -> None:
        super().close()
        self._kill()

    def _kill(self) -> None:
        """End the server. The reaper also ends all processes that it has started."""
        if self.process is not None:
            end_reaper(self.process)
            self.port.close()
            self.process = None
