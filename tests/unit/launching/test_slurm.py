"""Nodes and ranks from a step's environment, without a Slurm."""

import os

import pytest

from megatron_rft.launching import ranks as launcher
from megatron_rft.launching import slurm
from megatron_rft.launching.slurm import Node
from megatron_rft.utils.errors import ConfigError

BATCH = {"SLURM_JOB_ID": "12", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
STEP = BATCH | {
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


@pytest.fixture
def in_step(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", launcher.PARENT):
        monkeypatch.setenv(name, "")  # removed again after the test
        monkeypatch.delenv(name)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("n1", "n1"),
        ("n[1-4]", "n1"),
        ("n[08-11,13],m2", "n08"),
        ("login,n[1-4]", "login"),
        ("rack[2-3]-n[5,7]", "rack2-n5"),
        ("a-[1]", "a-1"),
    ],
)
def test_first_host(nodes, first):
    assert slurm.first_host(nodes) == first


def test_a_batch_script_is_alone():
    assert slurm.this_node(BATCH) == Node()
    slurm.check_ranks_per_node(8, BATCH)


def test_a_node_of_a_step():
    assert slurm.this_node(STEP) == Node(1, 2, "gpu07", slurm.port(STEP))
    given = STEP | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4000"}
    assert slurm.this_node(given) == Node(1, 2, "10.0.0.7", 4000)


def test_ports_differ_between_steps_and_starts_and_are_not_the_systems():
    ports = {slurm.port(STEP | change) for change in ({}, {"SLURM_STEP_ID": "1"}, {"SLURM_RESTART_COUNT": "1"})}
    assert len(ports) == 3 and all(20000 <= port < 30000 for port in ports)


def test_ranks_per_node():
    with pytest.raises(ConfigError, match=r"2\(x2\) tasks per node, each of which would start 8 ranks"):
        slurm.check_ranks_per_node(8, STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"})
    with pytest.raises(ConfigError, match="node n2 has 4 GPUs"):
        slurm.check_ranks_per_node(8, STEP | {"SLURM_GPUS_ON_NODE": "4", "SLURMD_NODENAME": "n2"})
    slurm.check_ranks_per_node(8, STEP | {"SLURM_GPUS_ON_NODE": "8"})


class TestEnvironment:
    def test_launchers_of_several_nodes(self, in_step):
        assert launcher.check_environment(4) == (8, 4, slurm.this_node(STEP))

    def test_launchers_in_containers_whose_hook_calls_every_task_a_rank(self, in_step, monkeypatch):
        """enroot's 50-slurm-pytorch.sh sets a rank for every task; torchrun's ranks, which have other numbers, are
        kept."""
        for name, value in {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        assert launcher.check_environment(4) == (8, 4, slurm.this_node(STEP))
        assert "RANK" not in os.environ
        for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match="a launcher has started 2 ranks already"):
            launcher.check_environment(4)

    def test_a_launcher_that_does_not_say_has_one_node(self, in_step, monkeypatch):
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "8")
        assert launcher.check_environment(None) == (8, 8, Node())
