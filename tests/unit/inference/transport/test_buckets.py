"""Streams through buckets far smaller than the tensors; sender and receiver run in turn."""

import os

import pytest
import torch

from megatron_rft.inference import process as process_engine
from megatron_rft.inference.engine import EngineLost
from megatron_rft.inference.process import EngineProcess
from megatron_rft.inference.transport.buckets import Buckets
from megatron_rft.inference.transport.shared_memory import host_memory, slots_of
from megatron_rft.utils.errors import RunFailed

TENSORS = [
    ("tiny", torch.arange(3, dtype=torch.float32)),
    ("large", torch.randn(40, 7)),
    ("odd", torch.randn(5, 5, dtype=torch.bfloat16)),
    ("transposed", torch.randn(6, 4).t()),
    ("scalar", torch.tensor(2.5)),
    ("last", torch.randn(31)),
]


def buckets_of(size: int) -> Buckets:
    return Buckets(torch.empty(2, size, dtype=torch.uint8))


def through(size: int, damage=lambda buckets: None) -> list[tuple[str, torch.Tensor]]:
    """The stream as it is received. The receiver reads a bucket as soon as it is announced."""
    buckets, told = buckets_of(size), []
    buckets.send(TENSORS, told.append, lambda: None) if size > 4096 else None
    if told:
        damage(buckets)
        return list(buckets.receive(told, lambda: None))
    # One thread: each full bucket is copied, as the receiver would read it, before the sender continues.
    kept, other = [], buckets_of(size)
    buckets.send(TENSORS, lambda full: kept.append((full, buckets.slots[full.slot].clone())), lambda: None)

    def arriving():
        for full, content in kept:
            other.slots[full.slot] = content
            yield full

    assert len(kept) > 4
    return list(other.receive(arriving(), lambda: None))


@pytest.mark.parametrize("size", [64, 200, 1 << 16])
def test_what_comes_out_is_what_went_in(size):
    found = through(size)
    assert [name for name, _ in found] == [name for name, _ in TENSORS]
    for (_, one), (_, other) in zip(TENSORS, found, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_damage_is_noticed():
    def damage(buckets):
        buckets.slots[0, 20] += 1

    with pytest.raises(RunFailed, match="begins with tiny was damaged"):
        through(1 << 16, damage)


def test_the_sender_waits_before_it_writes_over_an_unread_bucket():
    buckets, told, waits = buckets_of(64), [], []
    buckets.send(TENSORS, lambda full: told.append(full.slot), lambda: waits.append(len(told)))
    assert told == [i % 2 for i in range(len(told))]
    assert waits == [*range(2, len(told) + 1), len(told)]  # never more than one is unread when another is filled


def test_all_buckets_but_the_last_are_full_and_an_empty_tensor_is_a_piece():
    sizes, told = [34, 0, 70, 24, 150], []
    stream = [(str(size), torch.zeros(size, dtype=torch.uint8)) for size in sizes]
    buckets_of(64).send(stream, told.append, lambda: None)
    assert [full.length for full in told] == [64, 64, 64, 64, 22]
    pieces = [[(piece.name, piece.start, piece.length) for piece in full.pieces] for full in told[:3]]
    assert pieces[0] == [("34", 0, 34), ("0", 0, 0), ("70", 0, 30)]
    assert pieces[1:] == [[("70", 30, 40), ("24", 0, 24)], [("150", 0, 64)]]


def test_memory_of_the_host_is_seen_by_whoever_has_its_descriptor():
    file = host_memory(4096)
    mine, theirs = slots_of(file.fileno()), slots_of(os.dup(file.fileno()))
    mine[1, 7] = 42
    assert theirs.shape == (2, 4096) and theirs[1, 7] == 42
    file.close()
    assert theirs[1, 7] == 42  # as long as a tensor looks at it


class Process(EngineProcess):
    """Another process that answers as instructed, without a GPU."""

    def __init__(self, answer):
        self._memory, self._on_gpu, self.answer, self.asked = host_memory(4096), torch.zeros(2, 8), answer, []

    def _send(self, *message):
        self.asked.append(message)

    def _reply(self, timeout_s=None):
        if isinstance(self.answer, Exception):
            raise self.answer


@pytest.mark.parametrize(
    "own, answer, transport",
    [
        (None, None, "shared host memory"),
        ("GPU-3", None, "shared host memory"),
        ("GPU-1", None, "CUDA IPC"),
        ("GPU-1", RunFailed("not allowed here"), "shared host memory (no CUDA IPC: not allowed here)"),
        ("GPU-1", EngineLost("engine 0 ended"), None),
    ],
)
def test_where_the_buckets_of_an_engine_process_lie(monkeypatch, own, answer, transport):
    monkeypatch.setattr(process_engine, "local_gpu", lambda: own)
    monkeypatch.setattr(process_engine, "shared", lambda slots: ("GPU-1", []))
    process = Process(answer)
    if transport is None:
        with pytest.raises(EngineLost):
            process._place_buckets(["GPU-0", "GPU-1"])
        return
    process._place_buckets(["GPU-0", "GPU-1"])
    assert process.transport == transport
    assert process.asked == ([("open", "GPU-1", [])] if own == "GPU-1" else [])
    assert (process._buckets.slots is process._on_gpu) == (transport == "CUDA IPC")
    process._memory.close()
