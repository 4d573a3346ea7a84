"""Starts the ranks of a node, passes signals on to them, and reports which one failed. Imports no torch.

Unlike torchrun it passes SIGUSR1 and SIGTERM on and lets the ranks save, returns their exit status, names a rank that
was killed, and ends all ranks when it ends. On several nodes Slurm starts this process once on each node (`launch/`).
A process that finds RANK in its environment, set by torchrun for example, is a rank.

Every rank writes RUN/launch/rank_N.json, `{"status": 75, "message": "..."}`, for launchers that get no exit status.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_rft.config.sections import Faults
from megatron_rft.launching import slurm
from megatron_rft.launching.hangs import Watch, position_file, stack_folder
from megatron_rft.launching.job import Job
from megatron_rft.launching.slurm import Node
from megatron_rft.utils.device import has_cuda_device
from megatron_rft.utils.end_with_parent import die_with
from megatron_rft.utils.errors import FAILED, FINISHED, STOPPED, USER_ERROR, ConfigError
from megatron_rft.utils.files import read_json, temporary_folder, write_atomically
from megatron_rft.utils.position import STACKS, here, write_stacks_on_signal
from megatron_rft.utils.processes import FIRST_INTERRUPT, STOP_SIGNALS, Interrupts, reserved_port

EXIT_TIMEOUT_S = 10.0  # time for the other ranks to notice a failure and to end by themselves
STOPPING = (signal.SIGTERM, signal.SIGUSR1)
MOST_THREADS = 8  # of a rank beside a GPU
NODE, LIMITS = Node(), Faults()
LONGEST_TMPDIR = 60  # characters: the path of a socket has at most 107
PARENT = "MEGATRON_RFT_LAUNCHER"  # environment variable of ranks: the pid of the launcher


@dataclass
class Rank:
    number: int
    process: subprocess.Popen
    signal_sent: int | None = None  # the last signal that the launcher sent

    @property
    def status(self) -> int | None:
        """The exit status; None while the rank runs; negative: the signal that killed it. STOPPED if the launcher sent
        that signal before the rank had a handler."""
        code = self.process.poll()
        sent = self.signal_sent
        return STOPPED if code is not None and sent in STOPPING and code == -sent else code


def ranks_folder(output_dir: str) -> Path:
    return Path(output_dir) / "launch"


def write_exit(output_dir: str, status: int, message: str = "") -> bool:
    """Write a rank's exit status and message. Returns False if the disk is full or refuses writes."""
    words = json.dumps({"status": status, "message": message, "time": time.time()}) + "\n"
    with contextlib.suppress(OSError):
        write_atomically(ranks_folder(output_dir) / f"rank_{os.environ.get('RANK', '0')}.json", words)
        return True
    return False


def read_exit(output_dir: str, rank: int) -> dict:
    return read_json(ranks_folder(output_dir) / f"rank_{rank}.json") or {"message": "", "time": time.time()}


def die_with_launcher() -> None:
    """End this rank when the launcher that started it ends."""
    if PARENT in os.environ:
        die_with(int(os.environ[PARENT]))


def show_position(output_dir: str) -> None:
    """Let others see where this rank is. A rank of a launcher also lets it ask for its stack."""
    folder, rank = ranks_folder(output_dir), int(os.environ.get("RANK", 0))
    with contextlib.suppress(OSError):  # a full disk is not this function's to report
        here.open(position_file(folder, rank))
    if PARENT in os.environ:
        os.environ[STACKS] = str(stack_folder(folder).resolve() / f"rank_{rank}")
        write_stacks_on_signal(Path(f"{os.environ[STACKS]}.stack"))


def use_one_gpu(folder: Path = Path("/proc/driver/nvidia/gpus")) -> None:
    """Set CUDA_VISIBLE_DEVICES to the GPU of this local rank, before torch is imported. It is for workers without a
    process group, because vLLM then uses the first visible GPU."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given is not None else [str(n) for n in range(len(list(folder.glob("*"))))]
    if names and "LOCAL_RANK" in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = names[int(os.environ["LOCAL_RANK"]) % len(names)]


def launch(
    command: list[str], nproc: int, output_dir: str, node: Node = NODE, job: Job | None = None, faults: Faults = LIMITS
) -> int:
    """Run `command` as `nproc` ranks on this node, print a line about any failure, and return the exit status.

    All nodes of a queued `job` return the same status, that of the job. A run that hangs (`faults`) fails.
    """
    if nproc > (cores := len(os.sched_getaffinity(0))):
        print(f"warning: {nproc} ranks share {cores} processor cores: --nproc {cores} is faster", file=sys.stderr)
    ranks: list[Rank] = []
    with _forward_signals(ranks) as forwarded, reserved_port() as free, temporary_folder() as temporary:
        watch = Watch(ranks_folder(output_dir), node, faults)
        try:
            if job is not None:
                job.begin()
            environment = _environment(nproc, node, node.port or free.getsockname()[1], temporary)
            for local in range(nproc):
                number = node.index * nproc + local
                for file in [*watch.folder.glob(f"**/rank_{number}[._]*")]:  # of an earlier start, of this rank alone
                    file.unlink(missing_ok=True)
                ranks.append(Rank(number, _start(command, environment, number, local)))
                if forwarded:  # a signal came while ranks were being started
                    _send(ranks[-1:], forwarded[-1])
            elsewhere = _watch(ranks, job, watch)
            stopped = _end(ranks)
        finally:
            _kill(ranks)
        if watch.hung:
            status = _conclude_hang(watch, output_dir, job)
        else:
            status = _conclude(ranks, stopped, output_dir, elsewhere)
        if job is not None:
            status, message = job.conclude(status)
            if message:
                print(f"error: {message}", file=sys.stderr)
            for number in STOP_SIGNALS:  # Slurm signals all nodes after the first nonzero status; keep this node's
                signal.signal(number, signal.SIG_IGN)
        return status


def _watch(ranks: list[Rank], job: Job | None, watch: Watch) -> str | None:
    """Wait until a rank fails, all have ended, the run hangs, or another node has failed. Returns the message about
    that node."""
    stop_sent = False
    for tick in itertools.count():
        if not any(_alive(ranks)) or any(rank.status not in (None, FINISHED, STOPPED) for rank in ranks):
            return None
        time.sleep(0.1)
        if watch.look([rank.number for rank in _alive(ranks)]):
            _kill(ranks)
            return None
        if job is None or tick % 10:
            continue
        if (job.start / "stop").exists() and not stop_sent:
            stop_sent = True
            _send(ranks, signal.SIGUSR1)
        if elsewhere := job.failed_elsewhere():
            return elsewhere


def _conclude_hang(watch: Watch, output_dir: str, job: Job | None) -> int:
    hung = watch.hung
    report = f"{watch.folder}/hang_*.txt has where each rank is, and its stack"
    print(f"error: the run hangs: {hung.sentence}. {report}", file=sys.stderr)
    print(f"The same command goes on from the last checkpoint in {output_dir}", file=sys.stderr)
    hosts = {state.host for state in hung.guilty}
    if job is not None and watch.node.index == 0 and len(hosts) == 1:
        job.note_hang(*hosts)
    return FAILED


def _environment(nproc: int, node: Node, port: int, temporary: Path) -> dict[str, str]:
    """What all ranks of this node have in common."""
    # On CPUs the threads of several ranks would compete; beside GPUs a rank works alone on its share of the processors.
    share = min(len(os.sched_getaffinity(0)) // nproc, MOST_THREADS) if has_cuda_device() else 1
    threads = {"OMP_NUM_THREADS": str(max(share, 1))} if nproc > 1 else {}
    # vLLM leaves sockets and files among the temporary ones when it is killed.
    folder = {"TMPDIR": str(temporary)} if len(str(temporary)) <= LONGEST_TMPDIR else {}
    ranks = {"WORLD_SIZE": str(nproc * node.count), "LOCAL_WORLD_SIZE": str(nproc), PARENT: str(os.getpid())}
    main = {"MASTER_ADDR": node.address, "MASTER_PORT": str(port)}
    return threads | compiler_caches() | os.environ | folder | ranks | main


def compiler_caches() -> dict[str, str]:
    """Return the folders of compilers' caches, which later runs use too. On the node: in a shared home, hundreds of
    ranks would write the same files at once."""
    root = f"{tempfile.gettempdir()}/megatron_rft_{os.getuid()}"
    names = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
    return {name: f"{root}/{folder}" for name, folder in names.items()}


def _start(command: list[str], environment: dict[str, str], rank: int, local: int) -> subprocess.Popen:
    """Start a rank in its own session, so that Ctrl-C reaches it only through this process."""
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(local)}
    return subprocess.Popen(command, env=environment | numbers, start_new_session=True)


@contextlib.contextmanager
def _forward_signals(ranks: list[Rank]):
    """Forward SIGTERM and SIGUSR1 to the ranks, the first Ctrl-C as SIGTERM (save and end), the second as SIGKILL.
    Yields the list of forwarded signals."""
    interrupts, forwarded = Interrupts(), []

    def forward(number: int, _frame) -> None:
        if number == signal.SIGINT:
            number = signal.SIGKILL if interrupts.again() else signal.SIGTERM
            if number not in forwarded:
                os.write(2, FIRST_INTERRUPT.encode() if number == signal.SIGTERM else b"\n")
        forwarded.append(number)
        _send(ranks, number)

    before = {number: signal.signal(number, forward) for number in STOP_SIGNALS}
    try:
        yield forwarded
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, handler)


def _send(ranks: list[Rank], number: int) -> None:
    for rank in _alive(ranks):
        rank.signal_sent = number
        with contextlib.suppress(ProcessLookupError):
            rank.process.send_signal(number)


def _alive(ranks: list[Rank]) -> list[Rank]:
    return [rank for rank in ranks if rank.status is None]


def _end(ranks: list[Rank]) -> list[int]:
    """Wait for the remaining ranks after a failure. Kills those that do not end in time, and returns their numbers."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while _alive(ranks) and time.monotonic() < deadline:
        time.sleep(0.1)
    stopped = [rank.number for rank in _alive(ranks)]
    _kill(ranks)
    return stopped


def _kill(ranks: list[Rank]) -> None:
    for rank in _alive(ranks):
        rank.process.kill()
    for rank in ranks:
        rank.process.wait()


def _conclude(ranks: list[Rank], stopped: list[int], output_dir: str, elsewhere: str | None) -> int:
    if elsewhere:
        print(f"error: {elsewhere}; the ranks of this one were stopped", file=sys.stderr)
        return FAILED
    statuses = {rank.number: rank.status for rank in ranks}
    ended = {FINISHED, STOPPED}
    if ended.issuperset(statuses.values()):
        return STOPPED if STOPPED in statuses.values() else FINISHED
    killed = [number for number, status in statuses.items() if status < 0 and number not in stopped]
    # A rank that aborts does so because another one died: name the others first.
    killed = [number for number in killed if statuses[number] != -signal.SIGABRT] or killed
    if killed:
        names = ", ".join(f"rank {number} was killed by {signal.Signals(-statuses[number]).name}" for number in killed)
        fix = f"The same command continues from the last checkpoint in {output_dir}"
        print(f"error: {names}; the other ranks were stopped. {fix}", file=sys.stderr)
        return FAILED
    failed = [number for number, status in statuses.items() if status not in ended and number not in stopped]
    wrong = [number for number in failed if statuses[number] == USER_ERROR]
    first = min(wrong or failed, key=lambda number: read_exit(output_dir, number)["time"])
    message = read_exit(output_dir, first)["message"] or f"ended with status {statuses[first]}"
    print(f"error: {message}" if wrong else f"error: rank {first} failed: {message}", file=sys.stderr)
    return USER_ERROR if wrong else FAILED


def check_environment(nproc: int | None) -> tuple[int, int, Node]:
    """Return the numbers of ranks of the run and on this node, and this node among those whose launchers start `nproc`
    ranks each.

    The ranks may exist already, started by another launcher.
    """
    if nproc is not None:
        slurm.clear_hook_variables()
    if "RANK" not in os.environ:
        node, nproc = slurm.this_node(), nproc or 1
        slurm.check_ranks_per_node(nproc)
        return nproc * node.count, nproc, node
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if nproc not in (None, world) and PARENT not in os.environ:
        raise ConfigError(f"nproc {nproc}: a launcher has started {world} ranks already: leave it out")
    return world, int(os.environ.get("LOCAL_WORLD_SIZE", world)), Node()  # a launcher without it runs on one node
