"""Where the ranks meet. What they do there is in tests/parity."""

import os
import socket
import subprocess
import sys

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
    """In a process of its own: in this one another test's ranks may have met."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        places = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, "-c", MEET]
        done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True, timeout=240)
    assert f"the ranks cannot meet at 127.0.0.1:{port} " in done.stdout, done.stdout + done.stderr
    assert "address already in use" in done.stdout.lower()
