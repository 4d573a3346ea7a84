"""Starts Python processes with torch, megatron-core and the trainers already imported.

Importing them takes ten seconds of processor time, and the tests start a hundred runs. A server process imports them
once and forks for each start. What comes of it is a real process: it has a pid and a process group of its own, it is a
child of the test's process, and it can be frozen, signalled and killed. Its ranks are forked as well. `Forked` takes
the place of `subprocess.Popen`. The engine processes and vLLM servers of a run are forked from a small server of the
run's own, which it forks before anything else, and so are the processes that multiprocessing starts for such a server.

What a fork cannot show is that a new interpreter can import the package. The tests that start `python -m megatron_rft`
for real show that (`tests/slurm`, and `forked=False` in `tests/integration/tiny.py`), and so does
`tests/parity/test_vllm_server.py` for vLLM's server. The command line and the environment in /proc are the server's.
"""

import atexit
import ctypes
import fcntl
import gc
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from functools import cache
from importlib import import_module
from pathlib import Path

from megatron_rft.utils import end_with_parent
from megatron_rft.utils.end_with_parent import PR_SET_CHILD_SUBREAPER, STOP_SIGNALS, die_with, parent_of
from megatron_rft.utils.processes import ENDING, REAPER

ROOT = Path(__file__).resolve().parents[1]
PATHS = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": PATHS}
NO_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # pyarrow's jemalloc would have one
IMPORTED = (
    "megatron_rft.commands.main",
    "megatron_rft.training.generate",
    "megatron_rft.training.online",
    "megatron_rft.training.offline",
    "megatron_rft.objectives.grpo",
    "megatron_rft.data.stream",
    "megatron_rft.commands.train",
    "megatron_rft.environments.worker",
    "megatron_rft.inference.hf.engine",
    "megatron_rft.rewards.math",
    "mpmath",
    "numpy.ctypeslib",
    "torch.utils.serialization.config",
    "matplotlib.pyplot",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
API_SERVER = "vllm.entrypoints.openai.api_server"
VLLM = (
    "megatron_rft.inference.vllm.worker_extension",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.renderers.hf",
    API_SERVER,
)
VLLM_SERVERS = (API_SERVER, "megatron_rft.inference.vllm.seeing_server")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
PR_SET_NAME = 15  # linux/prctl.h
MAXIMUM_REQUEST = 1 << 20  # bytes
MADV_COLLAPSE = 25  # linux/mman.h
ENGINE = [sys.executable, "-m", "megatron_rft.inference.process_worker"]


subprocess_popen = subprocess.Popen  # `become` puts ForkedHere in its place
spawnv_passfds = multiprocessing.util.spawnv_passfds  # and `spawned`


class Forked(subprocess.Popen):
    """`Popen([sys.executable, ...])` whose process is forked from the server, for processes that are not forks of
    it."""

    more: tuple[str, ...] = ()  # what its server imports beside IMPORTED

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        self._forked(server(self.more), rest[3:9], request(args, env, cwd))

    def _forked(self, by: "Server", pipes: tuple[int, ...], asked: dict, pass_fds: tuple[int, ...] = ()) -> None:
        """`pipes`: those of stdin, stdout and stderr, two each."""
        self.pid = by.start(asked, pipes[3], pipes[5], pass_fds)
        self._child_created = True
        self._close_pipe_fds(*pipes)


class ForkedVLLM(Forked):
    """The same for runs with vLLM: its import takes five seconds of processor time."""

    more = VLLM


class ForkedEngine(Forked):
    """The same for engine processes and vLLM servers; other commands start as usual."""

    engines: "Server | None" = None  # the server of a process that was forked itself

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        if list(args[:3]) == list(ENDING) and list(args[4:7]) == ENGINE:
            asked = request(args[4:], env, cwd) | {"parent": int(args[3]), "inherited": list(pass_fds)}
            return self._forked(self.engines or server(()), rest[3:9], asked, pass_fds)
        if list(args[:4]) == list(REAPER) and args[7:8] == ["-c"] and args[9] in VLLM_SERVERS:
            asked = request(args[6:], env, cwd) | {"parent": int(args[5]), "remove": args[4]}
            return self._forked(self.engines or server(VLLM), rest[3:9], asked, pass_fds)
        return subprocess_popen._execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)


class ForkedHere(ForkedEngine):
    """The same in a process that was forked from the server, also for the runs and ranks that it starts."""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        if not is_ours(args, env):
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        pipes = rest[3:9]
        outputs = [own if given == -1 else given for own, given in ((1, pipes[3]), (2, pipes[5]))]
        others = [each for each in pipes if each != -1]
        self.pid = fork(lambda: detached(request(args, env, cwd), outputs, others))
        self._child_created = True
        self._close_pipe_fds(*pipes)


def spawned(path: str, command: list[str], descriptors: list[int]) -> int:
    """In place of multiprocessing's spawnv_passfds: what it starts with a new interpreter is forked."""
    if command[-1] != "--multiprocessing-fork":
        return spawnv_passfds(path, command, descriptors)
    blocked = [int(each) for each in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
    asked = request(command, None, None) | {"inherited": sorted(descriptors), "blocked": blocked}
    return ForkedEngine.engines.start(asked, 1, 2, tuple(asked["inherited"]))


def request(command: list, environment: dict[str, str] | None, folder: object) -> dict:
    return {
        "command": [str(word) for word in command],
        "environment": dict(os.environ if environment is None else environment),
        "folder": str(folder or os.getcwd()),
    }


def is_ours(command: object, environment: dict[str, str] | None) -> bool:
    """Whether the command is `python -m megatron_rft ...`, or `python SCRIPT ...` with a rank in the environment."""
    if not isinstance(command, list) or command[0] != sys.executable:
        return False
    return command[1:3] == ["-m", "megatron_rft"] or (command[1].endswith(".py") and "RANK" in (environment or {}))


class Server:
    """The side of the process that asks the server, which dies with it."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen | None = None):
        self.socket, self.process = connection, process

    def start(self, asked: dict, stdout: int, stderr: int, inherited: tuple[int, ...] = ()) -> int:
        """The pid of a child of this process. The parent that forked it has ended, and this process adopts orphans."""
        kernel = ctypes.CDLL(None)
        kernel.prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            out, err = (own if given == -1 else given for own, given in ((1, stdout), (2, stderr)))
            socket.send_fds(self.socket, [json.dumps(asked).encode()], [out, err, *inherited])
            answer = self.socket.recv(MAXIMUM_REQUEST)
        finally:
            kernel.prctl(PR_SET_CHILD_SUBREAPER, 0)
        assert answer, f"the fork server has ended with status {self.process and self.process.wait(timeout=60)}"
        pid = int(answer)
        assert parent_of(pid) == os.getpid()
        return pid


@cache
def server(more: tuple[str, ...]) -> Server:
    """The server of this process that imports `more`."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        command = [sys.executable, "-m", "tests.fork_server", str(other.fileno()), str(os.getpid()), *more]
        environment = os.environ | ENVIRONMENT | NO_THREADS
        options = {"cwd": ROOT, "pass_fds": [other.fileno()], "start_new_session": True}
        return Server(mine, subprocess_popen(command, env=environment, **options))


def server_of_engines() -> Server:
    """A server that is a fork of this process as it is now. It ignores stop signals, as an engine does."""
    mine, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        os.setsid(), mine.close()
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        die_with(parent)
        end_with(lambda: serve(other))
    other.close()
    return Server(mine)


def serve(connection: socket.socket) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MAXIMUM_REQUEST, 8)
        if not message:
            return
        connection.send(str(orphan(json.loads(message), descriptors, connection)).encode())
        for each in descriptors:
            os.close(each)


def orphan(asked: dict, descriptors: list[int], connection: socket.socket) -> int:
    """The pid of a process without a parent; the kernel makes it a child of the process that asks."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        fork(lambda: announced(writer, lambda: detached(asked, descriptors, [connection.fileno(), reader, writer])))
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(reader, 32))
    os.close(reader), os.close(writer)
    return pid


def announced(writer: int, action) -> None:
    """Run `action` after this process, which now has its own session, has written its pid: a kill of its group by who
    reads that reaches it."""
    os.write(writer, str(os.getpid()).encode())
    action()


def detached(asked: dict, descriptors: list[int], others: list[int]) -> None:
    """`become`, with `descriptors` as stdout and stderr, and then as those that the command expects."""
    numbers = [1, 2, *asked.get("inherited", ())]
    away = [fcntl.fcntl(each, fcntl.F_DUPFD, 64 + max(numbers)) for each in descriptors]
    for each in {*descriptors, *others} - {1, 2}:
        os.close(each)
    for number, each in zip(numbers, away, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.chdir(asked["folder"])
    if parent := asked.get("parent"):  # a helper: see utils/end_with_parent.py
        while os.getppid() != parent and Path(f"/proc/{parent}").exists():
            time.sleep(0.001)  # until it is an orphan
        if "remove" in asked:
            return reaped(asked, parent)
        as_helper(parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, asked.get("blocked", ()))
    become(asked["command"], asked["environment"], helper=bool(parent))


def as_helper(parent: int) -> None:
    die_with(parent)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def reaped(asked: dict, parent: int) -> None:
    """What end_with_parent.py does with --reap, and its command in a fork."""

    def command(reaper: int, _command: list[str]) -> None:
        end_with(lambda: (as_helper(reaper), become(asked["command"], asked["environment"])))

    end_with_parent.become = command
    status = end_with_parent.reaper(asked["remove"], parent, asked["command"])
    sys.exit(status if status >= 0 else 128 - status)


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


def become(command: list[str], environment: dict[str, str], helper: bool = False) -> None:
    """Run `python -m MODULE ...`, `python -c TEXT ...` or `python SCRIPT ...` in this process."""
    if not helper:
        ForkedEngine.engines = server_of_engines()
        multiprocessing.util.spawnv_passfds = spawned
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as in a new interpreter, it follows TMPDIR
    subprocess.Popen = ForkedHere
    for folder in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    if command[1] == "-m":
        name = command[2].rpartition(".")[2][:15]
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())  # what is left to tell it by
        sys.argv = command[2:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    elif command[1].startswith("-"):  # also options of the interpreter
        text = command.index("-c") + 1
        sys.argv = ["-c", *command[text + 1 :]]
        exec(command[text], {"__name__": "__main__"})
    else:
        sys.argv = command[1:]
        sys.path.insert(0, str(Path(command[1]).parent))
        runpy.run_path(command[1], run_name="__main__")


def import_all(more: list[str]) -> None:
    """IMPORTED and `more`, in a process that will fork; tests/run.sh calls it so that they are compiled."""
    gc.disable()  # while everything is imported there is nothing to collect
    warnings.simplefilter("ignore")
    # megatron-core imports flashinfer where it is installed, and that initialises CUDA, which no fork could then use
    sys.modules["flashinfer"] = None
    for name in IMPORTED:
        import_module(name)
    if more:
        import_module("megatron_rft.inference.vllm.cpu_patches").prepare()  # which comes before vLLM
    for name in more:
        import_module(name)
    del sys.modules["flashinfer"]
    for each in weakref.finalize._registry:  # at its end a process would take torch's operators apart, one by one
        _, function, *_ = each.peek()
        each.atexit &= function.__module__ != "torch.library"


def use_huge_pages() -> None:
    """Have the kernel (6.1 or later; others refuse) join this process's memory into pages of 2 MiB: a fork copies the
    table of its pages, which is most of what a fork costs."""
    advise, page = ctypes.CDLL(None).madvise, 1 << 21
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, inode, *_ = line.split()
        begin, end = (int(each, 16) // page * page for each in addresses.split("-"))
        if access == "rw-p" and inode == "0" and end > begin + page:
            advise(ctypes.c_void_p(begin + page), ctypes.c_size_t(end - begin - page), MADV_COLLAPSE)


def main() -> None:
    descriptor, parent, *more = sys.argv[1:]
    die_with(int(parent))
    import_all(more)
    gc.enable(), gc.collect(), gc.freeze()  # so that no collection in a fork looks at all that was imported
    use_huge_pages()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would have one, and the locks of the others"
    serve(socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    main()
