"""The address at which `megatron-rft serve` listens."""

import pytest

from megatron_rft.commands import serve
from megatron_rft.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def no_step(monkeypatch):
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)


def test_the_address_that_the_name_leads_to():
    assert serve.own_address("localhost") == "127.0.0.1"
    assert serve.own_address("127.0.0.5").startswith("127.")


def test_a_name_that_leads_to_this_machine_alone(monkeypatch):
    """Debian's own name leads to 127.0.1.1: the interface to the node that started the step is taken."""
    own = {"http://node7": "127.0.1.1", "http://10.0.0.1": "10.0.0.7"}
    monkeypatch.setattr(serve, "local_address", own.__getitem__)
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1")
    assert serve.own_address("node7") == "10.0.0.7"


def test_a_name_that_leads_to_an_address_is_not_second_guessed(monkeypatch):
    monkeypatch.setattr(serve, "local_address", {"http://node7": "10.1.0.7"}.__getitem__)
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.1")
    assert serve.own_address("node7") == "10.1.0.7"


def test_a_name_that_leads_nowhere():
    with pytest.raises(ConfigError, match="--host no-such-node.invalid: no address of this node"):
        serve.own_address("no-such-node.invalid")
