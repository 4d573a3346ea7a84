"""Kills a run with SIGKILL at random moments until it is done, and compares it with a run that nothing happened to.

    python tools/kill_test.py RECIPE --kills 10 [--out FOLDER] [--nproc N] [--seed S] [section.option=value ...]

The exported weights must be equal to the last bit, and so must every number in metrics.jsonl that no clock makes. The
exit status is 1 where they are not. A kill comes at a random time after a start, up to the time that the undisturbed
run took; where a start reaches the end before its kill, the last checkpoint is removed, so that the next one has
something to do.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CLOCKS = ("seconds/", "memory/", "ranks/", "time")
CLOCK_NAMES = ("tokens/per_second", "training/mfu", "rollout/", "sync/seconds", "faults/engine_restarts")


def start(arguments: argparse.Namespace, out: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "megatron_rft", "train", arguments.recipe, *arguments.overrides]
    command += [f"run.output_dir={out}", *(["--nproc", str(arguments.nproc)] if arguments.nproc > 1 else [])]
    log = out.with_suffix(".log").open("ab")
    return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def numbers(out: Path) -> list[dict]:
    """The lines of the log without what a clock makes."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{n: v for n, v in line.items() if not n.startswith((*CLOCKS, *CLOCK_NAMES))} for line in lines]


def export(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "export").glob("*.safetensors"))}


def kill(process: subprocess.Popen) -> None:
    """The process and its ranks, each of which leads a session and dies with the first."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def undo_the_end(out: Path) -> None:
    """Make a finished run one that was killed before its last checkpoint."""
    shutil.rmtree(out / "export", ignore_errors=True)
    checkpoints = sorted((out / "checkpoints").glob("step_??????"))
    if len(checkpoints) > 1:
        shutil.rmtree(checkpoints[-1])


def disturb(arguments: argparse.Namespace, out: Path, longest: float) -> None:
    moments = random.Random(arguments.seed)
    for number in range(1, arguments.kills + 1):
        process, after = start(arguments, out), moments.uniform(0, longest)
        try:
            process.wait(timeout=after)
            told = f"had ended with status {process.returncode}"
            undo_the_end(out)
        except subprocess.TimeoutExpired:
            kill(process)
            log = out / "metrics.jsonl"
            told = f"killed after {after:.1f} s, in step {len(log.read_text().splitlines()) if log.is_file() else 0}"
        print(f"{number:3} of {arguments.kills}: {told}", flush=True)


def finish(arguments: argparse.Namespace, out: Path) -> float:
    """Run to the end; seconds."""
    begin = time.monotonic()
    if status := start(arguments, out).wait():
        sys.exit(f"status {status}: {out.with_suffix('.log')}")
    return time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/kill_test"))
    arguments = parser.parse_intermixed_args()
    calm, killed = arguments.out / "undisturbed", arguments.out / "killed"
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    longest = finish(arguments, calm)
    disturb(arguments, killed, longest)
    finish(arguments, killed)
    weights, log = export(calm) == export(killed), numbers(calm) == numbers(killed)
    print(f"{arguments.kills} kills: weights {'equal' if weights else 'DIFFER'}, log {'equal' if log else 'DIFFERS'}")
    return int(not (weights and log))


if __name__ == "__main__":
    sys.exit(main())
