"""Measures several ways to one result, each in a fresh process, for the benchmarks of memory.

Memory is the peak over what was there before (resident set on a CPU, the allocator's peak on a GPU).
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path


def parser(description: str, sides: tuple[str, ...], hidden: int) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument("--vocab", type=int, default=151936)
    options.add_argument("--hidden", type=int, default=hidden)
    options.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    options.add_argument("--block-mib", type=int, default=64)
    options.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options.add_argument("--side", choices=sides, help=argparse.SUPPRESS)
    return options


def each(sides: tuple[str, ...]) -> dict[str, dict]:
    """Run this script with `--side` for each of the names, and return what it prints."""
    found = {}
    for side in sides:
        run = subprocess.run([sys.executable, *sys.argv, "--side", side], capture_output=True, text=True)
        if run.returncode != 0:
            sys.exit(f"the {side} side failed:\n{run.stderr[-2000:]}")
        found[side] = json.loads(run.stdout.splitlines()[-1])
    return found


def warm(once: Callable[[int, int], dict], args: argparse.Namespace, device: str) -> dict:
    """Measure `once(tokens, vocab)` after libraries are loaded and threads have started."""
    import torch

    once(64, 256)
    if device == "cuda":
        once(args.tokens, args.vocab)
    return once(args.tokens, args.vocab) | {"device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}


def device_and_dtype(args: argparse.Namespace):
    import torch

    torch.manual_seed(0)
    return "cuda" if torch.cuda.is_available() else "cpu", {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]


def setting(args: argparse.Namespace) -> dict:
    return {name: value for name, value in vars(args).items() if name not in ("json", "side")}


class Peak:
    """Measures the peak of bytes in use since `start`, minus those in use at `start`."""

    def __init__(self, device: str):
        self.device = device

    def start(self):
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again from here
            self.before = self.resident("VmRSS")

    def stop(self) -> int:
        import torch

        return (torch.cuda.max_memory_allocated() if self.device == "cuda" else self.resident("VmHWM")) - self.before

    @staticmethod
    def resident(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
