"""What a GPU shows in five minutes, where one is lent for a quarter of an hour without a network:

    python tools/gpu_kit.py pack       here: wheels for the other machine into build/gpu_kit, below 15 MB
    python tools/gpu_kit.py call       there: installs them, runs the checks, adds a line for each to the results
    python tools/gpu_kit.py report     the table of docs/gpu_results.md, from the lines that were measured on a GPU

The other machine has Python 3.12 with torch 2.11 for CUDA 13 and transformers 5.17, but no megatron-core. Each check
has a process of its own and a budget in seconds, and its line is on the disk and in the output before the next one
starts. A check that fails, hangs or dies does not stop the next. A call ends 30 s before its limit. Without a GPU it
runs the checks at their smallest size.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKED = ROOT / "build" / "gpu_kit"
RESULTS = ROOT / "runs" / "gpu_kit.jsonl"
PREDICTED = ROOT / "tools" / "gpu_predicted.json"
LARGEST, LIMIT, RESERVE = 15_000_000, 300, 30  # bytes to carry; seconds of a call, and left at its end
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
WHEELS = ["megatron-core==0.16.1", "pydantic==2.14.4", "pydantic-core==2.50.5", "annotated-types"]
NAMES = ("torch", "transformers", "megatron-core", "pydantic", "triton")


@dataclass(frozen=True)
class Check:
    """`arguments` are Python's; {state} is a folder of the call, {few} is empty on a GPU, where all steps are made."""

    name: str
    budget: float  # seconds
    arguments: tuple[str, ...]


def part(name: str, budget: float, *parts: str) -> Check:
    return Check(name, budget, ("tools/gpu_checks.py", "--out", "{state}/checks", "--only", *parts))


def training(name: str, budget: float, recipe: str, model: str, *options: str) -> Check:
    folders = f"run.output_dir={{state}}/{name.replace(' ', '_')}", f"model.path={{state}}/{model}"
    recipe = f"examples/quickstart/{recipe}.yaml"
    return Check(name, budget, ("-m", "megatron_rft", "train", recipe, *folders, "{few}", *options))


GRPO = ("rollout.engine=hf", "run.steps=5", "evaluation.every=null", "data.validation=null", "data.test=null")
# The most valuable first; together at most LIMIT - RESERVE
CHECKS = (
    part("ceilings", 20, "versions", "ceilings"),
    Check("model", 20, ("examples/quickstart/make_model.py", "{state}/model")),
    training(
        "warm start",
        35,
        "sft",
        "model",
        "run.steps=150",
        "run.epochs=null",
        "optimizer.lr_warmup_steps=0",
        "data.test=null",
    ),
    training("quickstart fp32", 35, "pipo", "warm_start/export", *GRPO),
    training("quickstart bf16", 35, "pipo", "warm_start/export", "model.precision=bf16", *GRPO),
    part("log-probs against float64", 20, "against float64"),
    part("gradients against the CPU", 30, "torch layers, against"),
    part("log-probs: time and memory", 35, "log-probs: "),
    part("throughput", 25, "torch layers, throughput, 600m"),
    part("weights to an engine process", 15, "CUDA IPC", "shared host memory"),
)


def pack(folder: Path = PACKED, largest: int = LARGEST) -> int:
    """Download wheels for Python 3.12 on Linux. Returns their bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    systems = [f"--platform=manylinux_2_{n}_x86_64" for n in range(5, 40)]
    systems += [f"--platform=manylinux{year}_x86_64" for year in (1, 2010, 2014)]
    kind = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", *kind, "-d", str(folder), *systems, *WHEELS], check=True
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    if size > largest:
        raise SystemExit(f"{folder} has {size / 1e6:.1f} MB, more than {largest / 1e6:.1f}")
    print(f"{folder}: {size / 1e6:.1f} MB")
    return size


def install(state: Path, packed: Path) -> dict[str, str]:
    """Install the wheels into a folder of the call. Returns the environment of the checks."""
    paths = [str(state / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    wheels = sorted(map(str, packed.glob("*.whl"))) if packed.is_dir() else []
    if wheels:
        options = ["--no-index", "--no-deps", "--no-compile", "--target", str(state / "site")]
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, *wheels], timeout=60)
        if done.returncode:  # other Python: the checks that need no megatron-core still run
            print(f"the wheels of {packed} are not installed: the checks run with what is installed", flush=True)
    else:
        print(f"{packed} has no wheels: the checks run with what is installed", flush=True)
    return environment


def call(checks: tuple[Check, ...], results: Path, limit: float, packed: Path = PACKED) -> bool:
    """Run the checks within `limit` seconds; more than LIMIT stretches their budgets. Returns whether all passed."""
    end, passed, stretch = time.monotonic() + limit - RESERVE, True, max(1.0, limit / LIMIT)
    with tempfile.TemporaryDirectory(prefix="gpu_kit_", ignore_cleanup_errors=True) as folder:
        state, device = Path(folder), gpu()
        environment = install(state, packed)
        about = {
            "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            "device": device,
            "versions": versions(state),
        }
        for check in checks:
            record = run(check, state, environment, min(check.budget * stretch, end - time.monotonic()), bool(device))
            passed &= record["status"] == "passed"
            write(results, {"check": check.name} | record | about)
    return passed


def run(check: Check, state: Path, environment: dict[str, str], seconds: float, device: bool) -> dict:
    """Run one check; after `seconds` it is killed with all processes that it started, and what it printed counts."""
    if seconds <= 0:
        return {"status": "not run: no time was left", "seconds": 0.0, "rows": []}
    words = {"state": str(state), "few": "" if device else "rollout.prompts_per_step=8"}
    if "train" in check.arguments and "sft" in check.arguments[3]:
        words["few"] = ""
    command = [sys.executable, *filter(None, (argument.format(**words) for argument in check.arguments))]
    begin, log = time.monotonic(), state / "log"
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        code = process.wait(seconds)
        status = "passed" if code == 0 else f"FAILED: exit status {code}"
    except subprocess.TimeoutExpired:
        status = f"FAILED: killed after {seconds:.0f} s"
    end_group(process)
    text = log.read_text(errors="replace")
    if status != "passed":
        print(text[-2000:], flush=True)
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), "rows": rows(text, state, check.name)}


def end_group(process: subprocess.Popen) -> None:
    """Kill a check and the processes that it left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows(text: str, state: Path, name: str) -> list[list[str]]:
    """What a check found, as [what, found, beside]: the rows that it printed, and the figures of a run's steps."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")
    ]
    found = [each[-3:] for each in cells if len(each) in (3, 4) and each[-3] and each[-3] != "what"]
    metrics = state / name.replace(" ", "_") / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.is_file() else []:
        step = json.loads(line)
        figures = [
            (key, step[key]) for key in ("policy/loss", "policy/grad_norm", "reward/mean", "mismatch/kl") if key in step
        ]
        shown = ", ".join(f"{key} {value:.4g}" for key, value in figures)
        found.append(
            [f"step {step.get('step')}", shown, f"{step['seconds/step']:.2f} s" if "seconds/step" in step else ""]
        )
    return found


def write(results: Path, record: dict) -> None:
    """A line in the output and in the file at once; a full disk does not end the call."""
    line = json.dumps(record)
    print(line, flush=True)
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        print(f"{results} could not be written ({error}): the line above is all there is", flush=True)


def gpu() -> str:
    """The name of the first GPU, without torch, which would keep memory of it; "" without one."""
    if not shutil.which("nvidia-smi"):
        return ""
    done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return done.stdout.splitlines()[0].strip() if not done.returncode and done.stdout.strip() else ""


def versions(state: Path) -> str:
    paths = [str(state / "site"), *sys.path]
    found = {d.metadata["Name"].lower(): d.version for d in reversed([*importlib.metadata.distributions(path=paths)])}
    return ", ".join(f"{name} {found[name]}" for name in NAMES if name in found)


def report(results: Path, page: Path, predicted: Path = PREDICTED) -> None:
    """Write the newest line of each check that ran on a GPU between the page's marks, beside what was predicted."""
    records = [json.loads(line) for line in results.read_text().splitlines()]
    newest = {record["check"]: record for record in records if record["device"]}
    if not newest:
        raise SystemExit(f"{results} has no line that was measured on a GPU: {page} stays as it is")
    tables = json.loads(predicted.read_text())
    lines = ["`python tools/gpu_kit.py call`; predictions: `tools/gpu_predicted.json`.", ""]
    for check, record in newest.items():
        expected = next((table for chip, table in tables.items() if chip in record["device"]), {}).get(check, {})
        lines += [
            f"### {check}",
            "",
            f"{record['date']}, {record['device']}, {record['versions']}: {record['status']}.",
            "",
        ]
        lines += ["| what | measured | predicted | beside |", "| --- | --- | --- | --- |"] if record["rows"] else []
        lines += [f"| {what} | {found} | {expected.get(what, '')} | {near} |" for what, found, near in record["rows"]]
        lines += [""] if record["rows"] else []
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a GPU shows in five minutes.")
    parser.add_argument("what", choices=("pack", "call", "report"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu_results.md", help="of report")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a call")
    args = parser.parse_args()
    if args.what == "pack":
        pack()
    elif args.what == "report":
        report(args.results, args.page)
    else:
        sys.exit(not call(CHECKS, args.results, args.limit))


if __name__ == "__main__":
    main()
