"""Ports for processes to meet at. What ends with whom is in the tests of those who start something."""

import socket
from contextlib import closing

import pytest

from megatron_rft.processes import reserved_port


def test_a_reserved_port_is_for_a_server_that_is_told():
    with reserved_port() as held, closing(socket.socket()) as other, closing(socket.socket()) as server:
        address = held.getsockname()
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        socket.create_connection(address, 1).close()
