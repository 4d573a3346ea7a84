"""Starts Python processes with torch, megatron-core and the trainers already imported.

Importing them takes ten seconds of processor time, and the tests start a hundred runs. A server process imports them
once and forks for each start. What comes of it is a real process: it has a pid and a process group of its own, it is a
child of the test's process, and it can be frozen, signalled and killed. Its ranks are forked as well. `Forked` takes
the place of `subprocess.Popen`.

What a fork cannot show is that a new interpreter can import the package. The tests that start `python -m megatron_rft`
for real show that (`tests/slurm`, and `forked=False` in `tests/integration/tiny.py`). The command line and the
environment in /proc are the server's.
"""

import atexit
import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from functools import cache
from importlib import import_module
from pathlib import Path

from megatron_rft.utils.processes import PR_SET_CHILD_SUBREAPER, die_with, parent_of

ROOT = Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": PATHS}
NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # pyarrow's jemalloc would have one
IMPORTED = (
    "megatron_rft.commands.main",
    "megatron_rft.training.generate",
    "megatron_rft.training",
    "megatron_rft.inference.hf.engine",
    "megatron_rft.rewards.math",
    "mpmath",
    "matplotlib.pyplot",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
MAXIMUM_REQUEST = 1 << 20  # bytes


class Forked(subprocess.Popen):
    """`Popen([sys.executable, ...])` whose process is forked from the server, for processes that are not forks of
    it."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        pipes = rest[3:9]  # after startupinfo, creationflags and shell: those of stdin, stdout and stderr, two each
        request = {"command": [str(word) for word in args], "environment": dict(os.environ if env is None else env)}
        self.pid = server().start(request | {"folder": str(cwd or os.getcwd())}, pipes[3], pipes[5])
        self._child_created = True
        self._close_pipe_fds(*pipes)


class ForkedHere(subprocess.Popen):
    """The same in a process that was forked from the server, for the runs and ranks that it starts. Other commands
    start as usual."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        if not is_ours(args, env):
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        pipes = rest[3:9]
        request = {
            "command": args,
            "environment": dict(os.environ if env is None else env),
            "folder": cwd or os.getcwd(),
        }
        outputs = [own if given == -1 else given for own, given in ((1, pipes[3]), (2, pipes[5]))]
        self.pid = fork(lambda: detached(request, outputs, [each for each in pipes if each != -1]))
        self._child_created = True
        self._close_pipe_fds(*pipes)


def is_ours(command: object, environment: dict[str, str] | None) -> bool:
    """Whether the command is `python -m megatron_rft ...`, or `python SCRIPT ...` with a rank in the environment."""
    if not isinstance(command, list) or command[0] != sys.executable:
        return False
    return command[1:3] == ["-m", "megatron_rft"] or (command[1].endswith(".py") and "RANK" in (environment or {}))


class Server:
    """The test's side of the server, which dies with this process."""

    def __init__(self):
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(other.fileno()), str(os.getpid())],
                env=os.environ | ENVIRONMENT | NO_THREADS,
                cwd=ROOT,
                pass_fds=[other.fileno()],
                start_new_session=True,
            )

    def start(self, request: dict, stdout: int, stderr: int) -> int:
        """The pid of a child of this process. The parent that forked it has ended, and this process adopts orphans."""
        kernel = ctypes.CDLL(None)
        kernel.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            out, err = (own if given == -1 else given for own, given in ((1, stdout), (2, stderr)))
            socket.send_fds(self.socket, [json.dumps(request).encode()], [out, err])
            answer = self.socket.recv(MAXIMUM_REQUEST)
        finally:
            kernel.prctl(PR_SET_CHILD_SUBREAPER, 0)
        assert answer, f"the fork server has ended with status {self.process.wait(timeout=60)}"
        pid = int(answer)
        assert parent_of(pid) == os.getpid()
        return pid


@cache
def server() -> Server:
    """The server of this process, ready."""
    return Server()


def serve(connection: socket.socket) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MAXIMUM_REQUEST, 2)
        if not message:
            return
        connection.send(str(orphan(json.loads(message), descriptors, connection)).encode())
        for each in descriptors:
            os.close(each)


def orphan(request: dict, descriptors: list[int], connection: socket.socket) -> int:
    """The pid of a process without a parent; the kernel makes it a child of the test's process."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        pid = fork(lambda: detached(request, descriptors, [connection.fileno(), reader, writer]))
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(reader, 32))
    os.close(reader), os.close(writer)
    return pid


def detached(request: dict, outputs: list[int], others: list[int]) -> None:
    """`become`, with `outputs` as stdout and stderr."""
    for number, given in enumerate(outputs, start=1):
        os.dup2(given, number)
    for each in {*outputs, *others} - {1, 2}:
        os.close(each)
    os.chdir(request["folder"])
    become(request["command"], request["environment"])


def fork(action) -> int:
    """The pid of a process that runs `action` and ends, in its own session. As after an exec, signals have their
    default effect from its start."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if pid == 0:
        end_with(action)
    return pid


def end_with(action) -> None:
    """Run `action` and then what an interpreter does at its end. Nothing of the calling stack runs in this process."""
    status = 1
    try:
        action()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush(), sys.stderr.flush()
    finally:
        os._exit(status)


def become(command: list[str], environment: dict[str, str]) -> None:
    """Run `python -m MODULE ...` or `python SCRIPT ...` in this process."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as in a new interpreter, it follows TMPDIR
    subprocess.Popen = ForkedHere
    for folder in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    if command[1] == "-m":
        sys.argv = command[2:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command[1:]
        sys.path.insert(0, str(Path(command[1]).parent))
        runpy.run_path(command[1], run_name="__main__")


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:])
    die_with(parent)
    warnings.simplefilter("ignore")
    # megatron-core imports flashinfer where it is installed, and that initialises CUDA, which no fork could then use
    sys.modules["flashinfer"] = None
    for name in IMPORTED:
        import_module(name)
    del sys.modules["flashinfer"]
    gc.collect(), gc.freeze()  # so that no collection in a fork looks at all that was imported
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would have one, and the locks of the others"
    serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main()
