"""When the engine of an offline or supervised run sleeps, and when it gets weights."""

from contextlib import nullcontext
from types import SimpleNamespace

from megatron_rft.data.stream import Stream
from megatron_rft.records import Batch
from megatron_rft.training.stored import StoredBatches


class Weights:
    """Records the calls."""

    def __init__(self):
        self.told, self.asleep, self.version = [], False, None

    def sent(self, version):
        return version == self.version and not self.asleep

    def sleep(self):
        self.asleep = True
        self.told.append("sleep")

    def sleep_to_save(self):
        self.sleep()

    def send(self, version, verify=False):
        self.asleep, self.version = False, version
        self.told.append(f"send {version}{' and compare' if verify else ''}")
        return {"sync/tensors": 1.0}


def batches(weights: Weights | None) -> StoredBatches:
    run = SimpleNamespace(stream=Stream([[1], [2], [3]]), weights=weights, phases=nullcontext)
    return StoredBatches(run, 2, lambda ids: Batch.of(ids, ids))


def test_the_engine_is_awake_for_evaluations_alone():
    weights = Weights()
    source = batches(weights)
    assert source.publish(0, asked=True, verify=True) == {"sync/tensors": 1.0}  # the evaluation before the first step
    for step in (1, 2):
        assert len(source.next(step)) == 2
        source.publish(step, asked=step == 2)
    source.publish(2, asked=True)  # the test at the end: the engine has these weights
    source.publish(1, asked=True)  # the best model's
    assert weights.told == ["send 0 and compare", "sleep", "sleep", "send 2", "send 1"]


def test_an_engine_that_slept_for_a_checkpoint_gets_the_same_weights_again():
    weights = Weights()
    source = batches(weights)
    source.publish(1, asked=True), source.state(), source.publish(1, asked=True), source.publish(1, asked=True)
    assert weights.told == ["send 1", "sleep", "send 1"]


def test_a_run_that_evaluates_nothing_has_no_engine():
    source = batches(None)
    assert source.publish(1, asked=True) == {} and len(source.next(1)) == 2
    assert source.report(1, source.next(2), []) == {"tokens/trained": 4.0}
