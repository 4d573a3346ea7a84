"""Helpers for tests on the Slurm cluster: submit jobs, wait, read output, disturb nodes. Every wait has a time
limit."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.integration.tiny import write_recipe

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools" / "one_machine_slurm"
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL"}


@dataclass(frozen=True)
class Cluster:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """A user's environment: account, partition, and the Python that runs the tests."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH", "LAUNCH"))}
        return mine | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{self.folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "SBATCH_ACCOUNT": "tests",
            "SBATCH_PARTITION": "batch",
            "LAUNCH_SETUP": ":",
        }

    def run(self, *command: object, timeout: float = 900, cwd: Path = ROOT, **variables: str) -> tuple[int, str]:
        """Exit status and output."""
        process = self.start(*command, cwd=cwd, **variables)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{command} is not done after {timeout} s: {process.communicate()[0]}") from None
        return process.returncode, output

    def ask(self, *command: object) -> str:
        """The output. A busy controller may let a question go unanswered."""
        for _ in range(10):
            status, output = self.run(*command)
            if status == 0:
                return output
            time.sleep(1)
        raise AssertionError(f"{command}: {output}")

    def start(self, *command: object, cwd: Path = ROOT, **variables: str) -> subprocess.Popen:
        return subprocess.Popen(
            [str(each) for each in command],
            env={k: v for k, v in (self.environment | variables).items() if v},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def submit(self, *command: object, **variables: str) -> "SlurmJob":
        status, output = self.run(*command, **variables)
        found = re.search(r"Submitted batch job (\d+)", output)
        assert status == 0 and found, output
        return SlurmJob(self, int(found[1]), ROOT / "runs" / "slurm" / found[1] / "stage_0")

    @property
    def jobs(self) -> set[int]:
        """All jobs that Slurm knows, also ended ones. Jobs in the second of two lists only were submitted in
        between."""
        return {int(number) for number in self.ask("squeue", "-h", "-t", "all", "-o", "%A").split()}

    def lose_node(self, number: int, job: "SlurmJob") -> None:
        """Kill the daemon and everything on the node, as in a power failure."""
        daemon = int((self.folder / f"slurmd.n{number}.pid").read_text())
        tasks = job.processes(SLURMD_NODENAME=f"n{number}", SLURM_STEP_ID="0")
        steps = set()
        for task in tasks:
            with contextlib.suppress(OSError):  # some live for a moment only
                parent = int(Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()[1])
                if Path(f"/proc/{parent}/comm").read_text() == "slurmstepd\n":
                    steps.add(parent)
        for process in [daemon, *steps, *tasks]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def start_node(self, number: int) -> None:
        status, output = self.run(TOOLS / "node.sh", self.folder, number)
        assert status == 0, output


@dataclass(frozen=True)
class SlurmJob:
    cluster: Cluster
    number: int
    folder: Path  # its first stage's notes

    def shown(self, name: str) -> str:
        return re.search(rf"\b{name}=(\S*)", self.cluster.ask("scontrol", "show", "job", "-o", self.number))[1]

    @property
    def state(self) -> str:
        return self.shown("JobState")

    @cached_property
    def _output(self) -> Path:
        return Path(self.shown("StdOut"))

    @property
    def log(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def wait(self, seconds: float = 1500) -> str:
        """Wait until the job has ended for good. Returns its last state. A requeued job need not wait Slurm's two
        minutes."""
        deadline = time.monotonic() + seconds
        while (state := self.state) not in ENDED:
            self.release()
            assert time.monotonic() < deadline, f"job {self.number} is {state} after {seconds} s\n{self.log[-6000:]}"
            time.sleep(0.3)
        return state

    def release(self) -> None:
        _, reason = self.cluster.run("squeue", "-h", "-j", self.number, "-t", "PENDING", "-o", "%r")
        if reason.strip() == "BeginTime":
            time.sleep(2)  # earlier, Slurm has not put it back yet
            self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 900) -> None:
        """Slurm answers slowly on a busy machine, and the steps of a tiny run are short: it is asked in a thread, while
        the condition is looked at all the time."""
        deadline, thread = time.monotonic() + seconds, ThreadPoolExecutor(1)
        ended = thread.submit(self._has_ended)
        try:
            while not condition():
                if ended.done():  # read first: changes at the job's end are then seen by the second look
                    assert not ended.result() or condition(), (
                        f"job {self.number} ended before: {what}\n{self.log[-6000:]}"
                    )
                    ended = thread.submit(self._has_ended)
                assert time.monotonic() < deadline, f"job {self.number}: no {what} in {seconds} s\n{self.log[-6000:]}"
                time.sleep(0.02)
        finally:
            thread.shutdown(wait=False)

    def _has_ended(self) -> bool:
        time.sleep(2)
        self.release()
        return self.state in ENDED

    def change(self, setting: str) -> None:
        self.cluster.ask("scontrol", "update", f"JobId={self.number}", setting)

    def set_time_left(self, minutes: int) -> None:
        """Set the time limit of this start, however long a busy machine has taken for it so far."""
        hours, passed, _ = map(int, self.shown("RunTime").split(":"))
        self.change(f"TimeLimit={60 * hours + passed + minutes}")

    def told_to_stop(self, start: int) -> bool:
        """Whether the word has come to a rank, which is paused: the signal of its launcher waits for it. A tiny run
        that goes on earlier may be over before its launcher sees the file."""
        told = (self.folder / f"start_{start}" / "stop").exists()
        return told and any(map(has_pending_stop, self.processes(LOCAL_RANK="0")))

    def processes(self, **variables: str) -> list[int]:
        """Ids of the job's processes with these environment variables. All nodes are this machine, which may have
        another cluster with a job of this number."""
        own = {"SLURM_JOB_ID": self.number, "SLURM_CONF": self.cluster.folder / "slurm.conf"}
        wanted = {f"{k}={v}".encode() for k, v in (own | variables).items()}
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if wanted <= set(entry.read_bytes().split(b"\0")):
                    found.append(int(entry.parent.name))
        return found

    def wait_until_gone(self, seconds: float = 900) -> None:
        """Wait for the job's processes: Slurm reports a job's last state before the last of them has ended."""
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, f"job {self.number} has left processes behind: {left}"
            time.sleep(0.2)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for rank in [*self.processes(LOCAL_RANK="0"), *self.processes(LOCAL_RANK="1")]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank, number)


def has_pending_stop(process: int) -> bool:
    """Whether SIGUSR1 waits for a process that is stopped."""
    with contextlib.suppress(OSError):
        found = re.search(r"^ShdPnd:\s*(\w+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
        return bool(int(found[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    return False


def tiny_keys(folder: Path, **more: object) -> list[str]:
    """Overrides that make a recipe of examples/pipo a run of seconds on CPUs, with the model of
    tests/integration/tiny."""
    if not (folder / "model").exists():
        write_recipe(folder)
    keys = {
        "run.output_dir": folder / "run",
        "run.steps": 6,
        "model.path": folder / "model",
        "model.initialise": "random",
        "model.precision": "fp32",
        "data.train": folder / "train.jsonl",
        "data.test": "null",
        "data.chat": "false",
        "data.max_prompt_tokens": 8,
        "rollout.prompts_per_step": 4,
        "rollout.max_response_tokens": 2,
        "batching.micro_batch_tokens": 64,
        "algorithm.mini_batch_prompts": 2,
        "optimizer.lr": 1e-2,
        "checkpoint.every": 2,
        "megatron.recompute_granularity": "null",
        "pipo.window": 2,
    }
    return [f"{name}={value}" for name, value in (keys | {k.replace("__", "."): v for k, v in more.items()}).items()]


def free_ports(count: int) -> int:
    """The first of this many consecutive free ports."""
    for first in range(16817, 19000, 10):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, each in enumerate(sockets):
                each.bind(("127.0.0.1", first + offset))
            return first
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
    raise AssertionError("no free ports")
