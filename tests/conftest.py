"""Whatever the tests are started in, and in whatever order, they find the same: nobody's rank, this machine without a
proxy, signals that are heard, and generators of random numbers that are as they were for every other test."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MEGATRON_RFT_LAUNCHER")

for name in list(os.environ):
    if name in RANKS or name.startswith(("SLURM", "TORCHELASTIC_", "PMI")):
        del os.environ[name]
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))

# What a script starts with `&` is deaf to Ctrl-C, and so is whatever that starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# With pytest-xdist a file's tests run in one worker, for its module's fixtures are whole runs; those of tests/slurm
# share one cluster. Whatever takes longest starts first.
FOLDERS = ("slurm", "parity", "integration", "bench", "unit")
TESTS = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FOLDERS.index(folder_of(item)) if folder_of(item) in FOLDERS else len(FOLDERS))
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            together = "slurm" if folder_of(item) == "slurm" else str(item.path.relative_to(TESTS))
            item.add_marker(pytest.mark.xdist_group(together))


def folder_of(item: pytest.Item) -> str:
    return item.path.relative_to(TESTS).parts[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Before the fixtures of a module as well, which no fixture comes before."""
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


@pytest.fixture(autouse=True)
def signal_handlers():
    """A run takes these signals for itself, and a job's launcher ends deaf to them: what a later test starts would be
    deaf as well."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
