"""Shared by the parts of gpu_checks.sh: a row of the table, a bound, a reason for not running, and the clock."""

import importlib.util
import os
import time
from collections.abc import Callable

import torch

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
Row = tuple[str, str, str]  # what, found, beside what


class NotRun(Exception):
    """This part cannot run here; the message says what is missing."""


def need(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise NotRun(f"{module} is not installed")


def need_gpu(capability: tuple[int, int] = (0, 0)) -> None:
    if not GPU:
        raise NotRun("no CUDA device")
    if torch.cuda.get_device_capability() < capability:
        raise NotRun(f"{torch.cuda.get_device_name()} is below compute capability {capability[0]}.{capability[1]}")


def without_rank() -> dict[str, str]:
    """Return the environment for a process that is to be a run of its own."""
    rank = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: value for name, value in os.environ.items() if name not in rank}


def bound(value: float, limit: float, what: str) -> Row:
    """Return a row that fails if the value is above its limit, or is not a number."""
    if not value <= limit:
        raise AssertionError(f"{what}: {value:.3g}, allowed {limit:.3g}")
    return what, f"{value:.2e}", f"<= {limit:.0e}"


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def seconds(function: Callable[[], object], repeats: int = 5) -> float:
    """Return the time of the fastest of some runs, after a warm-up run."""
    best = float("inf")
    for number in range(repeats + 1):
        wait()
        begin = time.perf_counter()
        function()
        wait()
        best = min(best, time.perf_counter() - begin) if number else best
    return best
