"""The memory of a run without a GPU, by hand, and the warning where the machine has less."""

from types import SimpleNamespace

import pytest

from megatron_rft.plan import host
from megatron_rft.plan.memory import GIB, State, gib


def memory(vllm: bool, checkpoint: int = 0) -> SimpleNamespace:
    """What host.py reads of a MemoryPlan."""
    sizes = dict(activations=4 * GIB, engine=3 * GIB, awake=0, cache=2 * GIB, links=0, host=GIB, checkpoint=checkpoint)
    engines = SimpleNamespace(by_vllm=vllm, weights=GIB)
    return SimpleNamespace(state=State(2 * GIB, GIB, GIB), engines=engines, **sizes)


@pytest.mark.parametrize("vllm, phase", [(False, 5), (True, 4 + 3)])
def test_a_rank_by_hand(vllm, phase):
    assert host.resident(memory(vllm)) / GIB == pytest.approx(host.LIBRARIES[vllm] + 4 + 1 + phase)


def test_a_warning_where_it_is_more_than_the_machine_has(monkeypatch):
    each = host.resident(memory(False))
    monkeypatch.setattr(host, "machine_bytes", lambda: 2 * each)
    assert len(host.lines(memory(False), 2, 0)) == 1
    for ranks, engines in ((3, 0), (2, 1)):
        told = host.lines(memory(False), ranks, engines)
        assert "may kill a rank" in told[1] and gib(2 * each) in told[1]
    assert gib(2 * each + round((1 + host.LIBRARIES[False]) * GIB)) in told[0]


def test_a_checkpoint_counts_where_it_is_the_most():
    m = memory(True, checkpoint=9 * GIB)  # in the place of 4 GiB of activations, beside the engine of vLLM
    each = host.resident(m)
    assert host.at_checkpoint(m) == each + 5 * GIB
    told = f"about {gib(each)} a rank, {gib(each + 5 * GIB)} during a checkpoint; {gib(each + 5 * GIB)} on this machine"
    assert told in host.lines(m, 1, 0)[0]
