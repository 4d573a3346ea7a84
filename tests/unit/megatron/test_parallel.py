"""Connecting the ranks. tests/parity has what they compute."""

import gc
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.config import Faults, Megatron
from megatron_rft.megatron import parallel
from megatron_rft.utils.errors import ConfigError
from tests.integration.tiny import wait_until

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
MEET = """
import megatron_rft.megatron  # prepares megatron-core for this host
from megatron_rft.config import Megatron
from megatron_rft.utils.errors import ConfigError
from megatron_rft.megatron import parallel

try:
    parallel.initialize(Megatron())
except ConfigError as error:
    print(error)
"""


def test_a_port_that_is_taken():
    """In a separate process, because ranks of another test may have used this one."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        places = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-c", MEET]
        done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, timeout=900)
    assert f"the ranks cannot meet at 127.0.0.1:{port} " in done.stdout, done.stdout + done.stderr
    assert "address already in use" in done.stdout.lower()


def test_a_process_that_no_launcher_started_has_a_ranks_variables_while_it_is_a_world(monkeypatch):
    """vLLM's external_launcher reads them."""
    parallel.shutdown()  # another test's world
    for name in (*VARIABLES, "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)  # as an engine of another test left them
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")  # what is set stays
    parallel.initialize(Megatron())
    try:
        assert [os.environ.get(name) for name in VARIABLES] == ["0", "0", "1", "1"]
        assert os.environ["MASTER_ADDR"] == "10.0.0.1" and os.environ["MASTER_PORT"].isdigit()
    finally:
        parallel.shutdown()
    assert not any(name in os.environ for name in (*VARIABLES, "MASTER_PORT")) and "MASTER_ADDR" in os.environ


def test_tensor_parallel_ranks_have_one_connection_to_their_gpu(monkeypatch):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "8"), monkeypatch.delenv(name)  # the first one has pytest remove what is set here
    parallel.shutdown()
    try:
        parallel.initialize(Megatron())
        assert name not in os.environ
        with pytest.raises(RuntimeError, match="not divisible"):  # the plan refuses it before
            parallel.initialize(Megatron(tensor_model_parallel_size=2))
        assert os.environ[name] == "1"
    finally:
        parallel.shutdown()


def test_a_rank_that_sees_only_one_gpu_of_its_node(monkeypatch):
    """srun --gpus-per-task=1: CUDA would say `invalid device ordinal`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "3"), monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ConfigError, match=r"rank 3 of this node .* of 8 ranks here it sees 1 GPU.* --gpus-per-node"):
        parallel.initialize(Megatron())


def test_a_gpu_that_torch_does_not_find_is_not_replaced_by_the_cpu(monkeypatch):
    monkeypatch.setattr(parallel, "has_cuda_device", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="has an NVIDIA GPU, but torch .* finds none: `megatron-rft doctor`"):
        parallel.initialize(Megatron())


def test_every_wait_has_its_own_limit():
    parallel.shutdown()
    limits = {"start_limit_s": 61.0, "step_limit_s": 62.0, "generation_limit_s": 63.0, "checkpoint_limit_s": 64.0}
    parallel.initialize(Megatron(), faults=Faults(**limits))
    try:
        found = {phase: seconds(parallel.host_group(phase)) for phase in parallel.PHASES}
        assert found == {"start": 61, "generation": 63, "checkpoint": 64}
        assert seconds(dist.group.WORLD) == 62
        assert seconds(parallel.dp_group()) == 120  # megatron-core takes minutes
    finally:
        parallel.shutdown()


def test_the_groups_of_a_process_share_a_device():
    """The thread of each device wakes up every 10 ms. A layout creates twenty groups."""
    parallel.shutdown()
    gc.unfreeze(), gc.collect()  # a run of an earlier test in this process has frozen its groups
    others = devices()  # of groups that the traceback of a failed test holds
    for _ in range(2):
        parallel.initialize(Megatron())
        assert wait_until(lambda: devices() == others + 1, seconds=60)  # a thread names itself
        parallel.destroy_layout()
    parallel.shutdown()
    assert wait_until(lambda: devices() == others, seconds=60)


def devices() -> int:
    found = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            found += path.read_text() == "gloo_tcp_loop\n"
    return found


def seconds(group):
    device = torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")
    return group._get_backend(device).options._timeout.total_seconds()


def test_ranks_of_one_node_meet_where_no_other_node_can_connect():
    """Of several nodes: at the node's own address, and on all interfaces where that is not known."""
    with socket.socket(fileno=parallel._listen("127.0.0.1", 0, several_nodes=False)) as listening:
        assert listening.getsockname()[0] == "127.0.0.1"
    assert parallel._listen("127.0.0.1", 0, several_nodes=True) is None
    assert parallel._listen("192.0.2.1", 0, several_nodes=True) is None  # not of this machine
