"""The arithmetic of a rehearsal by hand: roofline, links, peaks, bounds, and user errors."""

import pytest

from megatron_rft.plan.devices import Device, Efficiency, device
from megatron_rft.rehearsal import guard
from megatron_rft.rehearsal.ledger import Ledger
from megatron_rft.rehearsal.report import Stage, bounds, memory_lines, peak
from megatron_rft.utils.errors import UserError

CHIP = Device("chip", flops=100.0, bandwidth=10.0, memory=1 << 30, nvlink=8.0, network=2.0)
PERFECT = Efficiency(compute=1, memory=1, link=1, launch=0.5, latency=0)


@pytest.fixture
def ledger():
    return Ledger(CHIP, PERFECT, node=4)


def test_a_kernel_takes_its_arithmetic_or_its_traffic_or_a_launch(ledger):
    for flops, moved in ((300, 10), (100, 40), (1, 1)):
        ledger.kernel(flops, moved)
    count, flops, moved, seconds = ledger.kernels["between", "rest"]
    assert (count, flops, moved) == (3, 401, 51) and seconds == 3 + 4 + 0.5


def test_links_inside_a_node_and_across(ledger):
    assert ledger.link_seconds("allgather", [0, 1, 2, 3], 32) == 32 * 3 / 4 / 8
    assert ledger.link_seconds("allreduce", [0, 1], 32) == 2 * 32 / 2 / 8
    assert ledger.link_seconds("allgather", [0, 1, 4, 5], 32) == 32 * 3 / 4 / 4  # two ports of 2 on each node
    assert ledger.link_seconds("allgather", [0, 4], 32) == 32 / 2 / 2
    assert ledger.link_seconds("send", [0, 4], 32) == 16


def test_a_group_of_one_sends_nothing_and_gradients_are_no_part_of_a_micro_batch(ledger):
    with ledger.during("training"), ledger.doing("backward"):
        ledger.collective("allreduce", "tensor", [3], 8)
        ledger.collective("allreduce", "tensor", [2, 3], 8)
        ledger.collective("reduce_scatter", "data with cp", [0, 4], 8)
        ledger.collective("send", "pipeline", [0, 1], 8)
    assert [key[1] for key in ledger.links] == ["backward", "reduce", "pipeline"]


def test_a_phase_keeps_its_own_peak_by_category(ledger):
    memory = ledger.memory
    memory.add("weights", 10)
    with ledger.during("training"):
        memory.add("activations", 30)
        memory.add("activations", -30)
        memory.add("backward", 5)
    with ledger.during("log-probs"):
        memory.add("backward", -5)
    assert memory.peaks["training"] == (40, {"weights": 10, "": 0, "activations": 30})
    assert memory.peaks["log-probs"][0] == 15 and memory.total == 10


def stage(number=0, stages=1, kernels=(), links=(), times=None, peaks=None):
    found = {
        "times": times or {},
        "peaks": {name: {"total": sum(parts.values()), "parts": parts} for name, parts in (peaks or {}).items()},
        "host": {},
        "kernels": [["training", part, 1, 0, 0, seconds] for part, seconds in kernels],
        "links": [["training", part, "allreduce", "tensor", 2, "node", 1, 8, seconds] for part, seconds in links],
        "uploads": {},
        "waits": [],
        "micro_batches": {"training": 2},
    }
    return Stage(number, stages, 1, number, found)


def test_micro_batches_recur_and_the_pipeline_fills_and_drains():
    kernels, links = [("forward", 2.0), ("backward", 4.0), ("optimizer", 1.0)], [("forward", 1.0), ("reduce", 3.0)]
    options = {"kernels": kernels, "links": links, "times": {"training": (3, 4)}, "peaks": {"training": {"weights": 1}}}
    alone = stage(**options)
    assert alone.seconds("training", "kernels") == 3 * (6 * 4 + 1)
    assert alone.seconds("training", "links") == 3 * (4 + 3)
    assert bounds([alone]) == {"training": (75, 75 + 21)}
    last = stage(1, 2, **options)  # 8 micro-batches in all: one more of a pipeline of two
    assert last.seconds("training", "kernels") == 3 * (6 * 4 * 9 / 8 + 1)


def test_the_fullest_moment_of_all_stages():
    first = stage(0, 2, peaks={"start": {"optimizer": 99 << 30}, "training": {"weights": 3 << 30}})
    last = stage(1, 2, peaks={"training": {"weights": 2 << 30, "activations": 4 << 30}})
    found = peak([first, last])
    assert (found[0].number, found[1], found[2]) == (1, "training", 6 << 30)
    told = "\n".join(memory_lines([first, last], 1 << 30))
    assert "stage 2 of 2, training: 6.00 = activations 4.00, weights 2.00" in told and "1.00 of engines" in told


def test_an_unknown_device_is_named():
    assert device("H100").name == "H100"
    with pytest.raises(UserError, match="there is no device 'h300'. Did you mean 'h[12]00'?"):
        device("h300")


def test_without_a_compiler_one_sentence_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match="found no C.. compiler .no-such-compiler.: install g.."):
        guard.library(tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(UserError, match="cannot compile .*guard.cpp"):
        guard.library(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file cannot be written .*: set XDG_CACHE_HOME"):
        guard.library(tmp_path / "file")


def test_another_torch_is_refused(monkeypatch):
    monkeypatch.setattr(guard, "TESTED", {(1, 0)})
    with pytest.raises(UserError, match="tested with torch 1.0 only"):
        guard.torch_folder()


def test_the_guard_is_built_once(tmp_path):
    built = guard.library(tmp_path)
    before = built.stat().st_mtime_ns
    assert guard.library(tmp_path) == built and built.stat().st_mtime_ns == before
