"""`megatron-rft serve RECIPE`: runs vLLM servers on this node for a run of the recipe on other nodes.

It starts one server per GPU, or per `vllm.tensor_parallel_size` GPUs, at free ports, and stops them when it ends. A
lost server is restarted at its port, where the run waits for it. If a server never gets ready, the command ends.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import Popen

import torch

from megatron_rft.config import Recipe
from megatron_rft.inference.engine import EngineLost
from megatron_rft.inference.vllm import token_check
from megatron_rft.inference.vllm.arguments import save_config
from megatron_rft.inference.vllm.server_client import local_address
from megatron_rft.inference.vllm.server_process import spawn, wait_for
from megatron_rft.launching.hangs import host_name
from megatron_rft.plan import check_writable
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.vllm import check_vllm, choose_for
from megatron_rft.training import build
from megatron_rft.training.engines import EngineBuilder, visible_gpus
from megatron_rft.utils.errors import FINISHED, ConfigError
from megatron_rft.utils.files import write_atomically
from megatron_rft.utils.processes import end_reaper, reserved_port

HERE = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # uses no proxy


@dataclass
class EngineServer:
    """`start(port=, log=)` starts the server's process."""

    address: str
    port: int
    log: Path
    start: partial
    process: Popen | None = None

    def run(self) -> None:
        self.stop()
        self.process = self.start(port=self.port, log=self.log)

    def ask(self) -> None:
        try:
            HERE.open(f"http://{self.address}:{self.port}/health", timeout=5).close()
        except OSError as error:
            raise EngineLost(f"the server does not answer: {error}") from None

    def wait(self, limit_s: float) -> None:
        wait_for(self.process, self.ask, limit_s, f"the vLLM server of {self.log}", self.log)

    def stop(self) -> None:
        if self.process is not None:
            end_reaper(self.process)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM. Writes the servers' output to OUT/NODE_0.log ..., and their URLs to OUT/NODE.urls when all
    of them answer."""
    recipe: Recipe = args.loaded
    check_writable(args.out, "--out")
    if token := token_check.set_if_missing():
        print(f"export {token_check.VARIABLE}={token}  # for the run, without which the servers refuse it", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FINISHED))
    hf_config = build.load_hf_config(recipe.model)
    shape = ModelShape(hf_config.to_dict())
    engine = choose_for(recipe.rollout, shape)
    check_vllm(engine.name, recipe.vllm, recipe.rollout, recipe.longest_generation, shape, recipe.model.precision)
    engines = EngineBuilder(recipe)
    arguments = engines.server_arguments(hf_config)
    host = args.host or host_name()
    address = own_address(host)
    with ExitStack() as stack:
        model = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save_config(hf_config, model)
        start = partial(spawn, model, engines.dtype, host=address, arguments=arguments)
        servers = []
        for number, environment in enumerate(gpu_shares(recipe.vllm.tensor_parallel_size)):
            log = args.out / f"{host}_{number}.log"
            port = stack.enter_context(reserved_port(address)).getsockname()[1]
            servers.append(EngineServer(address, port, log, partial(start, environment=environment)))
            stack.callback(servers[-1].stop)
            servers[-1].run()
        for server in servers:
            server.wait(recipe.faults.engine_start_s)
        urls = [f"http://{host}:{server.port}" for server in servers]
        print(f"rollout.servers=[{','.join(urls)}]", flush=True)
        write_atomically(args.out / f"{host}.urls", "".join(f"{url}\n" for url in urls))
        watch(servers, recipe.faults.engine_start_s)


def own_address(host: str) -> str:
    """Return the address of this node that `host` leads to. Some systems resolve their own name to a loopback address:
    then it is the one at which the node that started this step of Slurm sees this one."""
    starter = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    try:
        found = local_address(f"http://{host}")
        return local_address(f"http://{starter}") if starter and found.startswith("127.") else found
    except OSError as error:
        raise ConfigError(f"--host {host}: no address of this node is found by it: {error}") from None


def gpu_shares(workers: int) -> list[dict[str, str]]:
    """The environment of each server, with its GPUs of this node."""
    if not torch.cuda.is_available():
        return [{}]
    gpus = visible_gpus()
    if len(gpus) % workers:
        raise ConfigError(f"vllm.tensor_parallel_size: this node's {len(gpus)} GPUs are not a multiple of {workers}")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[i : i + workers])} for i in range(0, len(gpus), workers)]


def watch(servers: list[EngineServer], limit_s: float) -> None:
    """Restart servers that end, forever."""
    while True:
        time.sleep(1)
        lost = [server for server in servers if server.process.poll() is not None]
        for server in lost:
            status = server.process.poll()
            print(f"a vLLM server ended with status {status} and is started again: {server.log}", flush=True)
            server.run()
        for server in lost:
            server.wait(limit_s)
