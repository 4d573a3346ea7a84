"""Runs a recipe for long while things go wrong, and compares it with a run that nothing happened to.

    PYTHONPATH=. python tools/soak.py RECIPE [--every 200] [--nproc 2] [--out FOLDER] [section.option=value ...]

Every `--every` steps the next of EVENTS happens, and the same command goes on. The exported weights and the log without
what a clock makes, must equal those of the undisturbed run, and no process, shared memory or temporary file may be left
behind. Memory, file handles, threads and processes of the undisturbed run may not grow after `--from-step`; memory may
by 5%. The exit status is 1 where anything of this fails. Only root can mount the full and the read-only disk.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from megatron_rft.launching.hangs import descendants
from megatron_rft.utils.end_with_parent import children, shared_memory
from megatron_rft.utils.files import write_atomically
from megatron_rft.utils.processes import started
from tests.integration.test_kill_and_resume import numbers
from tests.integration.tiny import ROOT, kill, start

JUMPING = str(ROOT / "tests/integration/jumping.py")
LOOK_S = 0.5  # between two looks at the processes, which read all of /proc
WINDOW = 10  # steps, over which the smallest count is taken: writers of checkpoints come and go
GROWTH = {"memory": 1.05, "handles": 1.0, "threads": 1.0, "processes": 1.0}
DAY_S = 86400.0
NOWHERE = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}  # nothing listens there


class Soak:
    """`out` gets the runs and their output. Their processes have a folder for temporary files, which must end empty."""

    def __init__(self, recipe: Path, arguments: list[str], out: Path, nproc: int = 2, forked: bool = False):
        self.recipe, self.out, self.forked = recipe, out, forked
        self.arguments = [*arguments, "--nproc", str(nproc)]
        self.temporary, self.clock = Path(tempfile.mkdtemp(prefix="soak")), out / "clock"
        self.environment = {"TMPDIR": str(self.temporary), "CLOCK": str(self.clock)}
        self.environment["TORCHINDUCTOR_CACHE_DIR"] = str(out / "kernels")  # stays on purpose, for later runs
        self.seen: dict[int, str] = {}  # pid -> when it was started
        self.shared: set[str] = set()  # files in /dev/shm that these processes have mapped
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)

    def start(self, run: Path) -> subprocess.Popen:
        options = [*self.arguments, f"run.output_dir={run}"]
        with (self.out / f"{run.name}.log").open("ab") as log:
            return start(self.recipe, *options, program=(JUMPING,), forked=self.forked, stdout=log, **self.environment)

    def follow(self, process: subprocess.Popen, run: Path, until: int | None, counts: dict | None = None) -> bool:
        """Look at the processes until they end, or until the log has step `until`: whether it has come."""
        looked = -LOOK_S
        while process.poll() is None:
            arrived = until is not None and last_step(run) >= until
            if arrived or time.monotonic() - looked > LOOK_S:
                pids, looked = [process.pid, *descendants(process.pid)], time.monotonic()
                self.remember(pids)
                step = {} if counts is None else counts.setdefault(last_step(run), {})
                step |= {name: min(value, step.get(name, value)) for name, value in count(pids).items()}
            if arrived:
                return True
            time.sleep(0.05)
        output = (self.out / f"{run.name}.log").read_text(errors="replace")
        assert process.returncode == 0, f"status {process.returncode}\n{output[-3000:]}"
        return False

    def remember(self, pids: list[int]) -> None:
        for pid in pids:
            if began := started(pid):
                self.seen[pid] = began
            self.shared |= shared_memory(pid, "/dev/shm/")

    def undisturbed(self, run: Path) -> dict[int, dict[str, float]]:
        """What the run's processes held, by its last logged step."""
        counts: dict[int, dict[str, float]] = {}
        self.follow(self.start(run), run, None, counts)
        return counts

    def disturbed(self, run: Path, every: int, events: int | None = None) -> list[str]:
        """Every `every` steps something happens, at most `events` times. Returns what, when, and how the run ended."""
        told, process, due = [], self.start(run), every
        while self.follow(process, run, due):
            step, what = last_step(run), EVENTS[len(told) % len(EVENTS)](self, run, process)
            due = None if len(told) + 1 == events else step + every
            told.append(f"step {step}: {what}" + ("" if process.poll() is None else f", status {process.returncode}"))
            process = self.start(run) if process.poll() is not None else process
        return told

    def left(self, seconds: float = 30.0) -> list[str]:
        """What is still there some seconds after the last run."""
        deadline = time.monotonic() + seconds
        while alive := [f"process {pid}" for pid, then in self.seen.items() if started(pid) == then]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        found = [*alive, *filter(os.path.exists, sorted(self.shared)), *map(str, sorted(self.temporary.iterdir()))]
        shutil.rmtree(self.temporary)
        return found


# ---- what happens


def kill_all(soak: Soak, run: Path, process: subprocess.Popen) -> str:
    kill(process)
    process.wait()
    return "killed"


def kill_a_rank(soak: Soak, run: Path, process: subprocess.Popen) -> str:
    with contextlib.suppress(ProcessLookupError, IndexError):  # they have just ended
        os.kill(children(process.pid)[-1], signal.SIGKILL)
    process.wait()
    return "one rank killed, as by the loss of its node"


def full_disk(soak: Soak, run: Path, process: subprocess.Popen) -> str:
    return mounted(run, process, "size=64k", "full disk")


def read_only(soak: Soak, run: Path, process: subprocess.Popen) -> str:
    return mounted(run, process, "ro", "read-only checkpoint folder")


def mounted(run: Path, process: subprocess.Popen, options: str, what: str) -> str:
    """Until the run ends, because it cannot save."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(run / "checkpoints")]
    if subprocess.run(command, capture_output=True).returncode:
        kill(process)
        process.wait()
        return f"killed ({what}: this user cannot mount)"
    try:
        process.wait(timeout=3600)
    finally:
        kill(process)
        process.wait()
        subprocess.run(["umount", "-l", str(run / "checkpoints")], check=True)
    return what


def jump(soak: Soak, run: Path, process: subprocess.Popen) -> str:
    """Forwards, and back the next time."""
    ahead = 0.0 if soak.clock.exists() and float(soak.clock.read_text()) else DAY_S
    write_atomically(soak.clock, str(ahead))  # its processes read it all the time
    return f"the clock jumps by a day, {'forwards' if ahead else 'back'}"


def wandb_away(soak: Soak, run: Path, process: subprocess.Popen) -> str:
    """From the next start on."""
    kill_all(soak, run, process)
    if find_spec("wandb") is None:
        return "killed (wandb is not installed)"
    if NOWHERE.keys() - soak.environment.keys():
        soak.arguments.append("tracking.wandb.project=soak")
        soak.environment |= NOWHERE
    return "killed; from here on wandb is on, and cannot be reached"


EVENTS: tuple[Callable[[Soak, Path, subprocess.Popen], str], ...] = (
    kill_all,
    full_disk,
    jump,
    kill_a_rank,
    wandb_away,
    read_only,
)


# ---- what is looked at


def last_step(run: Path) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError), (run / "metrics.jsonl").open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - (1 << 16), 0))
        return int(file.read().split(b'{"step": ')[-1].split(b",")[0])
    return 0


def count(pids: list[int]) -> dict[str, float]:
    found = {"memory": 0.0, "handles": 0, "threads": 0, "processes": 0}
    for pid in pids:
        with contextlib.suppress(OSError):
            folder = Path(f"/proc/{pid}")
            found["memory"] += int((folder / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30
            found["handles"] += len(os.listdir(folder / "fd"))
            found["threads"] += len(os.listdir(folder / "task"))
            found["processes"] += 1
    return found


def smallest(counts: dict[int, dict[str, float]], steps: range) -> dict[str, float]:
    chosen = [counts[step] for step in steps if step in counts]
    return {name: min(each[name] for each in chosen) for name in chosen[0]}


def export(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (run / "export").glob("*.safetensors")}


def growth(counts: dict[int, dict[str, float]], from_step: int) -> list[str]:
    """What has grown from `from_step` to the end."""
    end = max(counts)
    first, last = (smallest(counts, range(at, at + WINDOW)) for at in (from_step, end - WINDOW))
    for name in GROWTH:
        print(f"{name:10} {first[name]:.4g} from step {from_step}, {last[name]:.4g} before step {end}", flush=True)
    return [name for name, limit in GROWTH.items() if last[name] > limit * first[name]]


def differences(calm: Path, rough: Path) -> list[str]:
    weights, log = export(calm) == export(rough), numbers(calm) == numbers(rough)
    return ["weights"] * (not weights) + ["log"] * (not log)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--every", type=int, default=200)
    parser.add_argument("--from-step", type=int, default=100)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/soak"))
    options = parser.parse_intermixed_args()
    watched = Soak(options.recipe.resolve(), options.overrides, options.out.resolve(), options.nproc)
    calm, rough = watched.out / "undisturbed", watched.out / "disturbed"
    wrong = growth(watched.undisturbed(calm), options.from_step)
    print("\n".join(watched.disturbed(rough, options.every)), flush=True)
    wrong += differences(calm, rough) + watched.left()
    print(f"not as it should be: {', '.join(wrong)}" if wrong else "weights and log equal, nothing left behind")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
