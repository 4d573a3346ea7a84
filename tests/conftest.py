"""Gives every test the same environment: no variables of a rank, no proxy for this machine, default signal handlers,
and unchanged random generators. A file of tests must leave neither threads nor open files."""

import gc
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine must not fail a test, so examples have no time limit. They are the same in every run.
settings.register_profile(
    "without a clock", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("without a clock")

RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "MEGATRON_RFT_LAUNCHER")

for name in list(os.environ):
    if name in RANKS or name.startswith(("SLURM", "TORCHELASTIC_", "PMI")):
        del os.environ[name]
for name in ("no_proxy", "NO_PROXY"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"]))

# What a script starts with `&` is deaf to Ctrl-C, and so is whatever that starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # while files are imported there is nothing to collect

# Whatever takes longest starts first. tests/slurm waits, beside two that compute.
LONG = ("parity/test_vllm", "integration/test_rehearse", "integration/test_vision", "bench")
LONG += ("integration/test_shipped", "parity/test_gradient", "integration/test_agent", "integration/test_stop_signals")
LONG += ("integration/test_soak", "integration/test_hangs", "integration/test_wheel", "unit/inference/test_images")
PLACES = ("slurm", *LONG, "parity", "integration", "unit/inference/vllm", "unit")
TOGETHER = ("tests/slurm", "tests/unit/inference/vllm")  # in one worker


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only files with such tests for the part of `bash tests/run.sh all` that runs alone."""
    alone = config.option.markexpr == "alone" and collection_path.suffix == ".py"
    return True if alone and "mark.alone" not in collection_path.read_text() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next((i for i, name in enumerate(PLACES) if item.nodeid.startswith(f"tests/{name}")), len(PLACES))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.enable(), gc.collect(), gc.freeze()  # so that no collection in a test looks at all that was imported


def pytest_runtest_logreport(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Write skipped tests into a file, with the reasons, for tests/left_out.py."""
    if report.skipped and (path := os.environ.get("SKIPPED_TESTS")):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        with open(path, "a") as file:
            file.write(f"{report.nodeid}\t{reason.removeprefix('Skipped: ').splitlines()[0]}\n")


pytest_collectreport = pytest_runtest_logreport  # a file that is skipped as a whole


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """One worker per file, because a module's fixtures are whole runs; one worker for tests/slurm, which shares a
    cluster, and one for vLLM in the tests' process, where its import and its start take 25 s of processor time.
    (`--dist loadgroup` of pytest-xdist 3.8 sees no groups with pytest 9.2.)"""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path, _, name = nodeid.partition("::")
            together = next((each for each in TOGETHER if path.startswith(f"{each}/")), path)
            return TOGETHER[-1] if name.startswith("test_vllm_loads") else together

    return ByFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Runs before all fixtures, also those of modules: removes a rank's variables, which a process group of another
    test leaves."""
    for name in RANKS:
        os.environ.pop(name, None)
    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


# Threads and open files of libraries, such as torch's and vLLM's. One layout's groups have 48.
LEFT = 24


def held() -> dict[str, int]:
    return {name: len(os.listdir(f"/proc/self/{path}")) for name, path in (("threads", "task"), ("open files", "fd"))}


@pytest.fixture(autouse=True, scope="module")
def nothing_is_left(request):
    """Ends what a run of this process leaves when it fails: its process groups, which hold a hundred threads."""
    before = held()
    yield
    if parallel := sys.modules.get("megatron_rft.megatron.parallel"):
        parallel.shutdown()
    for _ in range(600):  # what one collection frees may hold more, and threads end when they have a processor
        left = {name: count - before[name] for name, count in held().items() if count > before[name] + LEFT}
        if not left:
            break
        gc.unfreeze()  # a run that fails in a step leaves what it holds frozen
        gc.collect(), gc.freeze(), time.sleep(0.1)
    assert not left, f"{request.node.nodeid} leaves more than it found: {left}"


@pytest.fixture(autouse=True)
def signal_handlers():
    """Restores signal handlers: runs replace them, and a job's launcher ends with the signals ignored, which later
    processes would inherit."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)
