"""Measures one transfer of weights between two processes of this machine, as between a trainer and a server.

    OMP_NUM_THREADS=1 python tools/bench/wire.py [--rounds 20]

Both ends only move tensors: the receiver takes each and lets it go. The median and the fastest of the rounds, by the
clock of the sender, beside the time that a plain copy of the same tensors takes.
"""

import argparse
import multiprocessing
import statistics
import time

import torch

from megatron_rft.inference.transport import network

SMALLEST = "--rounds 1 --models 1"  # tests/bench
# name -> tensors, elements of each
MODELS = {"300 small tensors, 1.5 MB": [(300, 2560)], "14 M parameters": [(300, 2560), (14, 1 << 20)]}
MODELS["134 M parameters"] = [(300, 2560), (128, 1 << 20)]


def tensors(groups: list[tuple[int, int]]) -> list[tuple[str, torch.Tensor]]:
    shapes = [size for count, size in groups for _ in range(count)]
    return [(f"layer.{i}.weight", torch.randn(size).bfloat16()) for i, size in enumerate(shapes)]


def receiver(port: int, transfers: int) -> None:
    link = network.connect(network.rendezvous("127.0.0.1", 2, 60, port), 1, 2, 60)
    for _ in range(transfers):
        for _ in network.receive(link):
            pass


def measure(name: str, rounds: int) -> None:
    stream = tensors(MODELS[name])
    store = network.rendezvous("127.0.0.1", 2, 60)
    other = multiprocessing.get_context("spawn").Process(target=receiver, args=(store.port, rounds + 2))
    other.start()
    link = network.connect(store, 0, 2, 60)
    target = [torch.empty_like(tensor) for _, tensor in stream]
    taken, copied = [], []
    for _ in range(rounds + 2):
        start = time.perf_counter()
        network.send(link, stream)
        taken.append(time.perf_counter() - start)
        for into, (_, tensor) in zip(target, stream, strict=True):
            into.copy_(tensor)
        copied.append(time.perf_counter() - start - taken[-1])
    other.join()
    taken, copied = sorted(taken[2:]), sorted(copied[2:])
    times = (statistics.median(taken), taken[0], copied[0])
    print(f"| {name} | " + " | ".join(f"{seconds * 1e3:.2f}" for seconds in times) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", type=int, default=len(MODELS), help="so many of the three, the smallest first")
    arguments = parser.parse_args()
    print("| | median, ms | fastest, ms | copy, ms |\n|---|---|---|---|", flush=True)
    for name in list(MODELS)[: arguments.models]:
        measure(name, arguments.rounds)


if __name__ == "__main__":
    main()
