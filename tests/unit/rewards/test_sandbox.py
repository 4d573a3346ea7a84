"""The sandbox: which container it uses, its limits, and what happens when a server dies."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from megatron_rft.commands import doctor
from megatron_rft.config.rewards import CodeOptions
from megatron_rft.rewards.code import CodeReward, container
from megatron_rft.rewards.registry import build
from megatron_rft.rewards.sandbox import launch, runner
from megatron_rft.rewards.sandbox.launch import SandboxError
from megatron_rft.rewards.sandbox.runner import Limits, Sandbox, run_script, run_tests
from megatron_rft.utils import processes
from megatron_rft.utils.errors import ConfigError

LIMITS = Limits(cpu_s=5.0, wall_s=10.0, memory_mb=256, disk_mb=4, output_mb=1)
UNLIMITED = 1e4  # in place of MAX_WAIT_FACTOR, where the longest wait for a processor is not what a test shows


def code_reward(**options) -> CodeReward:
    """Where there is a sandbox."""
    try:
        return CodeReward(**options)
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    try:
        sandbox = Sandbox(workers=3)
    except ConfigError as error:
        pytest.skip(str(error))
    yield sandbox
    sandbox.close()
    sandbox.close()


def script(source: str, text: str = ""):
    return lambda server, _: run_script(server, source, text, LIMITS)


def test_results_are_in_order_and_so_many_run_at_a_time(sandbox):
    three, running, lock = threading.Barrier(3), set(), threading.Lock()

    def work(server, number):
        with lock:
            running.add(number)
            assert len(running) <= 3
        three.wait(timeout=300)
        ended = run_script(server, f"import time; time.sleep({0.2 * (number % 3 == 0)}); print({number})", "", LIMITS)
        with lock:
            running.discard(number)
        return int(ended.output)

    assert sandbox.map(work, list(range(12))) == list(range(12))


def test_what_a_script_has(sandbox):
    source = (
        "import sys, threading, tempfile, random\n"
        "sys.setrecursionlimit(10**6); threading.stack_size(1 << 26)\n"
        "def depth(n): return 0 if n == 0 else 1 + depth(n - 1)\n"
        "def main():\n"
        "    with tempfile.TemporaryFile('w+') as f: f.write('kept'); f.seek(0); print(f.read())\n"
        "    print(depth(20000), sys.stdin.read(), input.__name__, __name__)\n"
        "threading.Thread(target=main).start()"
    )
    (ended,) = sandbox.map(script(source, "é"), [0])
    assert (ended.status, ended.output) == (0, "kept\n20000 é input __main__\n"), ended


AS_IN_PYTHON = {
    "output at exit": "import atexit, io, sys\nsys.stdout = io.StringIO()\n"
    "atexit.register(lambda: sys.__stdout__.write(sys.stdout.getvalue()))\nprint('ok')\nexit()",
    "a closed output": "import sys\nprint('ok')\nsys.stdout.close()",
    "no output any more": "import sys\nprint('ok')\nsys.stdout = None",
    "a larger stack": "import resource\nresource.setrlimit(resource.RLIMIT_STACK, (1 << 29, -1))\nprint('ok')",
    "no arguments": "import sys\nprint('ok' if len(sys.argv) == 1 else sys.argv)",
    "its own module": "import pickle\nclass A: pass\nprint('ok' if pickle.loads(pickle.dumps(A)) is A else 'other')",
}


@pytest.mark.parametrize("name", AS_IN_PYTHON)
def test_a_script_runs_as_in_python(name, sandbox):
    (ended,) = sandbox.map(script(AS_IN_PYTHON[name]), [0])
    assert (ended.status, ended.output.strip(), ended.errors) == (0, "ok", "")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("bytearray(300 << 20)", "MemoryError"),
        ("print('x' * (2 << 20))", "File too large"),
        ("for i in range(9): open(f'/tmp/{i}', 'w').write('x' * 900000)", "No space left"),
        ("import os; os.fork()", "Operation not permitted"),
    ],
)
def test_limits(sandbox, source, told):
    (ended,) = sandbox.map(script(source), [0])
    assert ended.status == 1 and told in ended.errors and not ended.timeout


def test_time(sandbox):
    programs, limits = ["while True: pass", "import time; time.sleep(60)"], Limits(cpu_s=1.0, wall_s=2.0)
    computes, sleeps = sandbox.map(lambda server, source: run_script(server, source, "", limits), programs)
    assert computes.timeout and sleeps.timeout


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not tell who waited")
def test_waiting_for_a_processor_does_not_count(monkeypatch):
    """Eight programs of 0.25 s of computing, limited to 1.5 s of elapsed time, on one processor."""
    monkeypatch.setattr(runner, "MAX_WAIT_FACTOR", UNLIMITED)
    limits, together = Limits(cpu_s=2.0, wall_s=1.5), threading.Barrier(8)
    busy = "import time\nwhile time.process_time() < 0.25: pass\nprint(1)"

    def work(server, _):
        together.wait(timeout=300)  # until all have their servers
        return run_script(server, busy, "", limits)

    processors, starter = os.sched_getaffinity(0), processes._starter(os.getpid())
    starter.submit(os.sched_setaffinity, 0, {min(processors)}).result()  # its servers inherit it
    try:
        sandbox = Sandbox(workers=8)
        runs = sandbox.map(work, list(range(8)))
        sandbox.close()
    except ConfigError as error:
        pytest.skip(str(error))
    finally:
        starter.submit(os.sched_setaffinity, 0, processors).result()
    assert [(run.output, run.timeout) for run in runs] == [("1\n", False)] * 8


CALL = """
import os, time
import program
clock = program._Clock(0.2, os.open("/proc/self/schedstat", os.O_RDONLY))
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
start, end = time.monotonic(), time.process_time() + 0.003
with clock:
    while time.process_time() < end: pass
print(time.monotonic() - start)
"""


def test_a_call_that_waits_for_a_processor_does_not_sleep():
    """It gets a third of a percent of one, beside a process with more right to it; a share of 2% in 0.4 s is sleep."""
    processor = {min(os.sched_getaffinity(0))}
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        os.sched_setaffinity(other.pid, processor)
        script = f"import os\nos.sched_setaffinity(0, {processor})\n{CALL}"
        folder = {"PYTHONPATH": str(Path(runner.__file__).with_name("inside"))}
        done = subprocess.run([sys.executable, "-c", script], env=os.environ | folder, capture_output=True, text=True)
        other.kill()
    assert done.returncode == 0, done
    assert float(done.stdout) > 0.5, "it did not wait: this proves nothing"


def test_programs_give_the_same_in_every_run(sandbox):
    source = "import random; print(random.random(), hash('a'), list({'b', 'c', 'd', 'e'}))"
    assert len({run.output for run in sandbox.map(script(source), list(range(6)))}) == 1


def test_a_dead_server_is_replaced_and_the_job_done_again(sandbox):
    killed = []

    def work(server, number):
        if not killed:
            killed.append(server.process.pid)
            children = psutil.Process(server.process.pid).children(recursive=True)
            for process in [*children, server.process]:
                with suppress(ProcessLookupError):  # it went with its parent, or with its container
                    os.kill(process.pid, signal.SIGKILL)
        return run_script(server, f"print({number})", "", LIMITS).output

    assert sandbox.map(work, [7]) == ["7\n"] and killed


def test_what_fails_twice_is_an_error(sandbox):
    def fails(server, _):
        raise SandboxError("no")

    (error,) = sandbox.map(fails, [0])
    assert isinstance(error, SandboxError)
    assert sandbox.map(script("print(1)"), [0])[0].output == "1\n"


def test_a_tester_that_breaks_off_is_our_error(sandbox):
    tests = {"kind": "assert", "code": "import os\nos._exit(0)"}
    (error,) = sandbox.map(lambda server, _: run_tests(server, "def f(): pass", tests, LIMITS), [0])
    assert isinstance(error, SandboxError) and "the tests ended with status 0" in str(error)


def options(**given) -> CodeOptions:
    return CodeOptions(timeout_s=1.0, row_timeout_s=60.0, memory_mb=256, workers=1, **given)


def test_without_a_container_a_flag_is_needed(monkeypatch, capfd):
    monkeypatch.setattr(launch, "command", broken_containers(launch.command))
    with pytest.raises(ConfigError, match="set without_container=true") as error:
        build(options(without_container=False))
    assert "works here (not allowed)" in str(error.value)
    assert doctor.told(container) == f"none: {error.value}"
    reward = build(options(without_container=True))
    try:
        assert not reward.sandbox.contained
        assert "THEY CAN READ THIS MACHINE'S FILES" in capfd.readouterr().err
        runs = reward.sandbox.map(script("print(1)"), [0]) + reward.sandbox.map(script("import os; os.fork()"), [0])
        assert runs[0].output == "1\n" and "not permitted" in runs[1].errors
    finally:
        reward.close()


def broken_containers(command):
    """A machine that allows no namespaces."""

    def instead(contained: bool, fd: int) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('not allowed')"] if contained else command(contained, fd)

    return instead


def test_the_doctor_says_what_holds():
    said = doctor.told(container)
    assert "without network" in said or "set without_container=true" in said


@pytest.mark.parametrize(
    ("code", "cpu_s", "late"), [(-9, 0.95, True), (-9, 0.4, True), (-9, 0.02, False), (-11, 0.95, False)]
)
def test_a_kill_after_much_computing_is_the_limit_of_computing(code, cpu_s, late):
    """On a busy machine the kernel's ticks, by which it kills, and the reported time are far apart."""
    with runner._file("") as out, runner._file("") as err:
        ended = runner._read({"timeout": False, "code": code, "cpu_s": cpu_s}, out, err, runner.Limits(cpu_s=1.0))
    assert ended.timeout is late
