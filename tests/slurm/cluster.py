"""What a test does on the cluster: submit, wait, look, disturb. Every wait has an end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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
        """Of a user who has set up his shell: account, partition, and the Python that runs the tests."""
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

    def run(self, *command: object, timeout: float = 60, cwd: Path = ROOT, **variables: str) -> tuple[int, str]:
        """Exit status and all that was printed."""
        environment = {k: v for k, v in (self.environment | variables).items() if v}
        done = subprocess.run(
            [str(each) for each in command],
            env=environment,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        return done.returncode, done.stdout

    def submit(self, *command: object, **variables: str) -> "SlurmJob":
        status, output = self.run(*command, **variables)
        found = re.search(r"Submitted batch job (\d+)", output)
        assert status == 0 and found, output
        return SlurmJob(self, int(found[1]))


@dataclass(frozen=True)
class SlurmJob:
    cluster: Cluster
    number: int

    def shown(self, name: str) -> str:
        _, output = self.cluster.run("scontrol", "show", "job", "-o", self.number)
        return re.search(rf"\b{name}=(\S*)", output)[1]

    @property
    def state(self) -> str:
        return self.shown("JobState")

    @property
    def log(self) -> str:
        path = Path(self.shown("StdOut"))
        return path.read_text() if path.exists() else ""

    @property
    def folder(self) -> Path:
        """Its first stage's notes."""
        return ROOT / "runs" / "slurm" / str(self.number) / "stage_0"

    def wait(self, seconds: float = 240) -> str:
        """Until it has ended, for good; its last state. A requeued job need not sit out Slurm's two minutes."""
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

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            self.release()
            assert self.state not in ENDED, f"job {self.number} ended before {what}\n{self.log[-6000:]}"
            assert time.monotonic() < deadline, f"job {self.number}: no {what} in {seconds} s\n{self.log[-6000:]}"
            time.sleep(0.1)

    def wait_for_start(self, number: int, seconds: float = 120) -> None:
        self.wait_for(lambda: (self.folder / f"start_{number}" / "before.json").exists(), f"start {number}", seconds)

    def ranks(self) -> list[int]:
        """Process ids of the ranks, all of which run on this machine."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = entry.read_bytes().split(b"\0")
            except OSError:
                continue
            mine = f"SLURM_JOB_ID={self.number}".encode() in variables
            if mine and any(each.startswith(b"MEGATRON_RFT_LAUNCHER=") for each in variables):
                found.append(int(entry.parent.name))
        return found

    def pause(self) -> None:
        """The ranks stand still, so that a test need not hurry."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for rank in self.ranks():
            try:
                os.kill(rank, number)
            except ProcessLookupError:
                continue


def tiny_keys(folder: Path, **more: object) -> list[str]:
    """What makes a recipe of examples/pipo a run of seconds on CPUs, with the model of tests/integration/tiny."""
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
        "tracking.plot": "false",
        "megatron.recompute_granularity": "null",
        "pipo.window": 2,
    }
    return [f"{name}={value}" for name, value in (keys | {k.replace("__", "."): v for k, v in more.items()}).items()]
