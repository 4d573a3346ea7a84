"""Where the ranks meet. What they do there is in tests/parity."""

import socket

import pytest
import torch.distributed as dist

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.config import Megatron
from megatron_rft.errors import ConfigError
from megatron_rft.megatron import parallel


def test_a_port_that_is_taken(monkeypatch):
    if dist.is_initialized():
        pytest.skip("another test's world is there")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        places = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in places.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=f"the ranks cannot meet at 127.0.0.1:{port} .*[aA]ddress already in use"):
            parallel.initialize(Megatron())
