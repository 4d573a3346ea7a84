"""Helpers of a run, which no stop signal reaches and which end with it; reserved ports; parents of processes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rft.utils import processes
from megatron_rft.utils.end_with_parent import children
from megatron_rft.utils.processes import (
    END,
    STOP_SIGNALS,
    Interrupts,
    activity,
    end_reaper,
    process_state,
    reserved_port,
    start_helper,
    without_stop_signals,
)

ENDED = ("", "Z")  # states
ANSWERS = "import sys; print('ready', flush=True); print(sys.stdin.readline(), flush=True)"


def test_a_reserved_port_is_for_a_server_that_is_told():
    with reserved_port() as held, closing(socket.socket()) as other, closing(socket.socket()) as server:
        address = held.getsockname()
        with pytest.raises(OSError, match="in use"):
            other.bind(address)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(address)
        server.listen()
        socket.create_connection(address, 1).close()


def test_children_of_a_process_whose_threads_come_and_go():
    """When a thread ends, its children go to another one; none is missed, and nothing fails."""
    started: list[subprocess.Popen] = []
    over = threading.Event()

    def busy():
        while not over.is_set():
            threads = [threading.Thread(target=time.sleep, args=(0.001,)) for _ in range(20)]
            for each in threads:
                each.start()
            for each in threads:
                each.join()

    noise = threading.Thread(target=busy)
    noise.start()
    try:
        for _ in range(3):
            starting = threading.Thread(target=lambda: started.append(subprocess.Popen(["sleep", "600"])))
            starting.start()
            for _ in range(10):
                assert {each.pid for each in started} <= set(children(os.getpid()))
            starting.join()
        assert {each.pid for each in started} <= set(children(os.getpid()))
    finally:
        over.set()
        noise.join()
        for each in started:
            each.kill()
            each.wait()


def test_a_second_interrupt_is_one_that_does_not_come_at_once(monkeypatch):
    moments = iter([10.0, 10.9, 11.1])
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: next(moments)))
    interrupts = Interrupts()
    assert [interrupts.again() for _ in range(3)] == [False, False, True]


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def signal_all(pid: int) -> None:
    for each in (pid, *children(pid)):
        for number in STOP_SIGNALS:
            os.kill(each, number)


# A library's handler (vLLM has some) must not bring a signal back, nor a shell, which may clear the mask.
@pytest.mark.parametrize("reap", [False, True])
@pytest.mark.parametrize("handler", ["", "import signal; [signal.signal(n, signal.SIG_DFL) for n in (2, 10, 15)]; "])
def test_no_stop_signal_reaches_a_helper(reap, handler):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with start_helper([sys.executable, "-c", handler + ANSWERS], reap, **pipes) as helper:
        signal_all(helper.pid)  # while it starts
        assert helper.stdout.readline() == "ready\n"
        signal_all(helper.pid)
        assert helper.communicate("still here\n")[0].strip() == "still here"
    assert helper.returncode == 0


def test_a_shell_that_clears_the_mask_ignores_them_too():
    kill = ["sh", "-c", "kill -TERM $$; kill -USR1 $$; kill -INT $$; echo here"]
    assert start_helper(kill, stdout=subprocess.PIPE, text=True).communicate()[0] == "here\n"


@pytest.mark.parametrize("how", ["start_helper(['sleep', '600'])", "start_helper(['sleep', '600'], reap=True)", "fork"])
def test_a_helper_ends_with_its_process_and_not_with_a_thread(how, tmp_path):
    """`how`: a helper that a thread starts, which then ends; or a fork."""
    forked = "with without_stop_signals():\n    if not os.fork(): die_with(own); open('pid', 'w'); time.sleep(600)"
    started = f"t = threading.Thread(target=lambda: {how}); t.start(); t.join()"
    script = "import os, threading, time\nfrom megatron_rft.utils.end_with_parent import die_with\n"
    script += "from megatron_rft.utils.processes import start_helper, without_stop_signals\nown = os.getpid()\n"
    script += f"{forked if how == 'fork' else started}\nprint('started', flush=True); time.sleep(600)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path, env=environment) as process:
        process.stdout.readline()
        wait_for(lambda: children(process.pid))
        helpers = children(process.pid)
        time.sleep(0.3)  # a helper that ended with its thread would be gone
        assert all(process_state(pid) not in ENDED for pid in helpers)
        process.kill()
    wait_for(lambda: all(process_state(pid) in ENDED for pid in helpers))


def test_a_fork_without_stop_signals_leaves_them_to_the_process():
    with without_stop_signals():
        pid = os.fork()
        if pid == 0:
            os._exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(STOP_SIGNALS)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)


def test_a_reaper_kills_all_descendants_when_signalled_repeatedly(tmp_path):
    """A command that left its session, and a child that lost its parent, both ignore SIGTERM."""
    deaf = "trap '' TERM; echo $$ >>pids; while :; do sleep 1; done"
    script = f'setsid sh -c "{deaf.replace("$", chr(92) + "$")}" & (sh -c "{deaf.replace("$", chr(92) + "$")}" &); wait'
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    reaper = start_helper(["sh", "-c", script], reap=True, cwd=tmp_path, env=environment)
    pids, deadline = tmp_path / "pids", time.monotonic() + 120
    while not pids.exists() or len(pids.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline and reaper.poll() is None
        time.sleep(0.02)
    for _ in range(20):
        reaper.send_signal(END)
    assert reaper.wait(timeout=120) == 128 + END
    assert not [pid for pid in pids.read_text().split() if Path(f"/proc/{pid}").exists()]


def test_a_reaper_that_is_ended_while_it_starts_ends():
    """Below nohup, too: the signal is ignored until the reaper handles it."""
    before = signal.signal(END, signal.SIG_IGN)
    try:
        process = start_helper([sys.executable, "-c", "import time; time.sleep(600)"], reap=True)
        process.send_signal(END)
        assert process.wait(60) == 128 + END
    finally:
        signal.signal(END, before)
        process.kill()


def test_what_a_command_does_now_and_how_long_it_has_computed():
    busy = start_helper([sys.executable, "-c", "while 1: pass"], reap=True)
    asleep = start_helper(["sleep", "600"], reap=True)
    wait_for(lambda: activity(busy.pid)[0] is None and activity(busy.pid)[1] > 0.1)
    wait_for(lambda: (now := activity(asleep.pid))[0] and now == activity(asleep.pid))
    assert activity(asleep.pid)[1] < 0.1
    end_reaper(busy), end_reaper(asleep)
    assert activity(busy.pid) == ("", 0.0)


def test_a_reaper_removes_shared_memory(tmp_path):
    """Python's own clean-up is a process that the reaper kills as well."""
    script = (
        "import time, pathlib; from multiprocessing.shared_memory import SharedMemory as S; m = S(create=True, size=9);"
        "pathlib.Path('new').write_text(m.name); pathlib.Path('new').rename('name'); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    reaper = start_helper([sys.executable, "-c", script], reap=True, cwd=tmp_path, env=environment)
    name, deadline = tmp_path / "name", time.monotonic() + 120
    while not name.exists():
        assert time.monotonic() < deadline and reaper.poll() is None
        time.sleep(0.02)
    shared = Path("/dev/shm") / name.read_text()
    assert shared.exists()
    end_reaper(reaper)
    assert reaper.returncode == 128 + END
    assert not shared.exists()
