"""Reserved ports and parents of processes. Other tests check which processes end together."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from megatron_rft.utils.processes import REAPER, children, reserved_port


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


def test_a_reaper_kills_all_descendants_when_signalled_repeatedly(tmp_path):
    """A command that left its session, and a child that lost its parent, both ignore SIGTERM."""
    deaf = "trap '' TERM; echo $$ >>pids; while :; do sleep 1; done"
    script = f'setsid sh -c "{deaf.replace("$", chr(92) + "$")}" & (sh -c "{deaf.replace("$", chr(92) + "$")}" &); wait'
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    reaper = subprocess.Popen([*REAPER, str(os.getpid()), "sh", "-c", script], cwd=tmp_path, env=environment)
    pids, deadline = tmp_path / "pids", time.monotonic() + 120
    while not pids.exists() or len(pids.read_text().splitlines()) < 2:
        assert time.monotonic() < deadline and reaper.poll() is None
        time.sleep(0.02)
    for _ in range(20):
        reaper.send_signal(signal.SIGTERM)
    assert reaper.wait(timeout=120) == 128 + signal.SIGTERM
    assert not [pid for pid in pids.read_text().split() if Path(f"/proc/{pid}").exists()]


def test_a_reaper_removes_shared_memory(tmp_path):
    """Python's own clean-up is a process that the reaper kills as well."""
    script = (
        "import time, pathlib; from multiprocessing.shared_memory import SharedMemory as S; m = S(create=True, size=9);"
        "pathlib.Path('new').write_text(m.name); pathlib.Path('new').rename('name'); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*REAPER, str(os.getpid()), sys.executable, "-c", script]
    reaper = subprocess.Popen(command, cwd=tmp_path, env=environment)
    name, deadline = tmp_path / "name", time.monotonic() + 120
    while not name.exists():
        assert time.monotonic() < deadline and reaper.poll() is None
        time.sleep(0.02)
    shared = Path("/dev/shm") / name.read_text()
    assert shared.exists()
    reaper.send_signal(signal.SIGTERM)
    assert reaper.wait(timeout=120) == 128 + signal.SIGTERM
    assert not shared.exists()
