"""The interface for gloo, with the addresses of made-up machines."""

import os
from types import SimpleNamespace

import psutil
import pytest

from megatron_rft.utils import network_interface
from megatron_rft.utils.network_interface import GLOO, name_for_gloo

CARDS = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.7"], "ib0": ["10.1.0.7"]}


@pytest.mark.parametrize(
    "own, towards, expected",
    [
        ("127.0.1.1", {"n0": "10.1.0.7", network_interface.OUTSIDE: "10.0.0.7"}, "ib0"),  # another node
        ("127.0.1.1", {"n0": "127.0.0.1", network_interface.OUTSIDE: "10.0.0.7"}, "eth0"),  # the first node itself
        (None, {"n0": "10.1.0.7"}, "ib0"),  # a name without an address
        ("10.0.0.7", {"n0": "10.1.0.7"}, None),  # gloo finds it alone
        ("127.0.1.1", {"n0": "127.0.0.1"}, None),  # no way out
    ],
)
def test_a_name_that_is_loopback(monkeypatch, own, towards, expected):
    monkeypatch.delenv(GLOO, raising=False)
    monkeypatch.setattr(network_interface, "_address_of", lambda name: own)
    monkeypatch.setattr(network_interface, "_address_towards", towards.get)
    cards = {name: [SimpleNamespace(address=each) for each in found] for name, found in CARDS.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
    name_for_gloo("n0")
    assert os.environ.pop(GLOO, None) == expected


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv(GLOO, "bond0")
    monkeypatch.setattr(network_interface, "_address_of", lambda name: "127.0.1.1")
    name_for_gloo("localhost")
    assert os.environ[GLOO] == "bond0"
