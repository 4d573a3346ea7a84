"""Both ends of a connection in two threads: the received tensors, damaged buckets, and the choice of transport."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron_rft.inference.transport import network
from megatron_rft.inference.transport.buckets import Buckets
from megatron_rft.utils.errors import RunFailed

TENSORS = [(f"layer.{i}", torch.full((i % 5, 3), float(i), dtype=torch.bfloat16)) for i in range(60)]
TENSORS += [("large", torch.randn(333, 7)), ("scalar", torch.tensor(2.5))]


@pytest.fixture(scope="module")
def ends():
    """The sender and two receivers, with buckets smaller than a tensor."""
    store = network.rendezvous("127.0.0.1", 3, 300)
    stores = [store, *(network.rendezvous("127.0.0.1", 3, 300, store.port) for _ in range(2))]
    with ThreadPoolExecutor(3) as pool:
        jobs = [
            pool.submit(network.connect, store, rank, 3, 300, secret="the run's") for rank, store in enumerate(stores)
        ]
        links = [job.result() for job in jobs]
    for link in links:
        link.buckets = Buckets(torch.empty(2, 4096, dtype=torch.uint8))
    assert not any("the run's" in key for key in store.list_keys()), "the store tells the secret"
    return links


def test_the_store_listens_on_the_address_of_rank_0_only():
    """This machine has other loopback addresses."""
    store = network.rendezvous("127.0.0.1", 1, 300)
    socket.create_connection(("127.0.0.1", store.port), 20).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), 20)


def over(ends, stream=TENSORS, between=lambda link: network.receive(link)):
    with ThreadPoolExecutor(3) as pool:
        sent = pool.submit(network.send, ends[0], stream)
        got = [pool.submit(lambda link=link: list(between(link))) for link in ends[1:]]
        sent.result()
        return [each.result() for each in got]


def test_every_end_gets_every_tensor_again_and_again(ends):
    for stream in (TENSORS, [(name, tensor + 1) for name, tensor in TENSORS], []):
        for found in over(ends, stream):
            assert [name for name, _ in found] == [name for name, _ in stream]
            for (_, one), (_, other) in zip(stream, found, strict=True):
                assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def test_many_small_tensors_are_few_announcements(ends, monkeypatch):
    told, announce = [], network.announce
    monkeypatch.setattr(network, "announce", lambda link, full: (told.append(full), announce(link, full)))
    over(ends, TENSORS[:60])
    assert len(told) == 2 and len(told[0].pieces) == 60 and told[1] is None


class Lossy(Buckets):
    """Loses what is put into a bucket."""

    def content(self, full):
        return super().content(full).clone()


def test_damage_in_transfer_is_reported_after_the_stream(ends, monkeypatch):
    """The receiver with the damage reports it; the sender and the other receiver finish normally."""
    monkeypatch.setattr(ends[1], "buckets", Lossy(torch.full((2, 4096), 7, dtype=torch.uint8)))
    with pytest.raises(RunFailed, match="the bucket of weights that begins with layer.0 was damaged"):
        over(ends)
    monkeypatch.undo()
    assert [len(found) for found in over(ends)] == [len(TENSORS)] * 2  # nothing is left on the way


@pytest.mark.parametrize("wrong", [{"secret": "a stranger's"}, {"announced": 0}], ids=["stranger", "said again"])
def test_weights_are_taken_from_the_trainer_alone(ends, monkeypatch, wrong):
    """A sender who got into the trainer's place of the group, but has another secret, or repeats an announcement."""
    over(ends)
    got, before = [], [link.announced for link in ends]
    for name, value in wrong.items():
        monkeypatch.setattr(ends[0], name, value)

    def keep(link):
        got.extend(network.receive(link))
        return got

    with pytest.raises(RunFailed, match="does not have the run's secret"):
        over(ends, [], keep)
    assert not got
    monkeypatch.undo()
    for link, announced in zip(ends, before, strict=True):
        link.announced = announced
    assert [len(found) for found in over(ends)] == [len(TENSORS)] * 2


def test_nccl_where_every_end_has_a_gpu_of_its_own():
    assert network.transport(["GPU-a", "GPU-b"]) == network.transport(["GPU-a", "GPU-b", "GPU-c"]) == network.GPU
    assert network.transport(["GPU-a", "GPU-a"]) == network.HOST  # a server beside its trainer
    assert network.transport(["GPU-a", None]) == network.transport([None, None]) == network.HOST
