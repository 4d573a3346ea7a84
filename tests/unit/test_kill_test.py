"""Kills and stop signals are tried with every algorithm."""

from megatron_rft.config.algorithms.offline import OFFLINE
from megatron_rft.config.algorithms.online import ONLINE
from tools.kill_test import NAMES, chosen


def test_every_algorithm_has_a_tiny_recipe():
    assert {*ONLINE, *OFFLINE} <= {name.split()[0] for name in NAMES}
    assert chosen("rpo") == ["rpo"] and "dr_grpo" in chosen("grpo")
