"""What a GPU shows in calls of five minutes, where one is lent for a quarter of an hour without a network:

    python tools/gpu_kit.py pack 1 [2] [3]      here: all that the call needs, into the folder build/gpu_kit/1
    python build/gpu_kit/1/tools/gpu_kit.py call 1 --results FILE     there: runs the checks, adds a line for each
    python tools/gpu_kit.py report              docs/gpu_results.md from tools/gpu_measured.jsonl

The other machine has Python 3.12 with torch 2.11 for CUDA 13, transformers 5.17, numpy and safetensors. Call 1 brings
megatron-core and uses torch's layers. Call 2 brings Transformer Engine too, and call 3 vLLM, with the code of sm_90
alone; what is installed there already needs no pack. Each check has a process of its own and a budget in seconds, and
its line is on the disk and in the output before the next one starts. A check that fails, hangs or dies does not stop
the next. A call ends 30 s before its limit. Without a GPU the checks run at their smallest size.
"""

import argparse
import contextlib
import datetime
import email.message
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

sys.path.insert(0, str(Path(__file__).parent))
import gpu_vllm  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / "build" / "gpu_kit"
RESULTS = ROOT / "runs" / "gpu_kit.jsonl"  # of calls
MEASURED = ROOT / "tools" / "gpu_measured.jsonl"  # what the page shows
PREDICTED = ROOT / "tools" / "gpu_predicted.json"
PAGE = ROOT / "docs" / "gpu_results.md"
LARGEST = {1: 15 << 20, 2: 60 << 20, 3: 60 << 20}  # bytes to carry
LIMIT, RESERVE, MISSING = 300, 30, 77  # seconds of a call, and left at its end; exit status: something is not here
AHEAD = 3  # checks after the present one whose processes import already
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
TE = "2.20.2"
LONGEST = 40  # rows of a check that the page has in full, of others the first and the last two
PREDICTORS = ("plan and floors", "rehearse", "on a CPU")
SMALL_WHEELS = ("megatron-core==0.16.1", "pydantic==2.14.4", "pydantic-core==2.50.5", "annotated-types")
SMALL_WHEELS += ("typing-inspection", "psutil")
WHEELS = {
    1: (*SMALL_WHEELS, "pillow", "cloudpickle"),
    2: (*SMALL_WHEELS, f"transformer-engine=={TE}", f"transformer-engine-cu13=={TE}", "einops", "nvdlfw-inspect")
    + ("onnx", "onnx-ir", "onnxscript", "ml-dtypes", "protobuf", "importlib-metadata", "lazy-importer", "zipp"),
    3: (*SMALL_WHEELS, "cloudpickle"),
}
UNUSED = {"nvidia-cudnn-frontend"}  # 11 MiB, of fused operators that megatron-core does not ask for
# of the environment in which Transformer Engine's extension for torch is compiled, once
COMPILER = ["torch==2.11.0", "setuptools==80.10.2", "wheel", "pybind11", "ninja", "numpy", "packaging", "pydantic"]
COMPILER += [f"nvidia-cuda-{part}==13.0.*" for part in ("nvcc", "crt", "cccl")] + ["nvidia-nvvm==13.0.*"]
NAMES = ("torch", "transformers", "megatron-core", "transformer-engine", "vllm", "pydantic", "triton")
FILES = ("megatron_rft/**/*", "examples/quickstart/*", "tools/gpu_*", "tools/bench/setups.py")


@dataclass(frozen=True)
class Check:
    """`arguments` are Python's; {state} is a folder of the call. `needs`: a module without which it is not run.
    `waits`: the process waits for a line before its work, so that it can import ahead of its turn."""

    name: str
    budget: float  # seconds
    arguments: tuple[str, ...]
    needs: str = ""
    waits: bool = False


def part(name: str, budget: float) -> Check:
    return Check(name, budget, ("tools/gpu_checks.py", name), waits=True)


def underscored(name: str) -> str:
    """A check's name in those of its files."""
    return name.replace(" ", "_")


def training(name: str, budget: float, recipe: str, model: str, *options: str) -> Check:
    folders = f"run.output_dir={{state}}/{underscored(name)}", f"model.path={{state}}/{model}"
    recipe, needs = f"examples/quickstart/{recipe}.yaml", "vllm" if name.startswith("vLLM") else ""
    return Check(name, budget, ("-m", "megatron_rft", "train", recipe, *folders, "data.test=null", *options), needs)


GRPO = ("rollout.engine=hf", "run.steps=5", "evaluation.every=null", "data.validation=null")
SFT = ("rollout.engine=hf", "run.steps=100", "run.epochs=null", "optimizer.lr_warmup_steps=0")
MODEL = (
    Check("model", 8, ("examples/quickstart/make_model.py", "{state}/model")),
    training("warm start", 30, "sft", "model", *SFT),
)
# every weight of the engine is compared with the trainer's after each sync, and a larger KL than the bound ends the run
VLLM = ("model.precision=bf16", *GRPO, "rollout.engine=vllm", "faults.compare_weights_every=1")
VLLM += ("faults.on_mismatch=stop", "faults.mismatch_kl=0.01", "vllm.kernel_config={{enable_jit_warmup: false}}")
ROUNDED, FP8 = (
    ("faults.mismatch_kl=0.05", "algorithm.importance=truncated"),
    ("fp8", "fp8_per_channel", "fp8_per_block"),
)
DRAFTS = "{{method: draft_model, model: {state}/warm_start/export, num_speculative_tokens: 4}}"
# The most valuable first; together at most LIMIT - RESERVE, call 3 without a limit
CALLS = {
    1: (
        part("ceilings", 30),
        *MODEL,
        training("quickstart fp32", 20, "pipo", "warm_start/export", *GRPO),
        training("quickstart bf16", 20, "pipo", "warm_start/export", "model.precision=bf16", *GRPO),
        part("gradients against the CPU", 30),
        part("log-probs against float64", 15),
        part("slice of Qwen3-8B", 60),
        part("weights to an engine process", 20),
        part("log-probs: time and memory", 15),
        part("offload of the trainer", 20),
    ),
    2: (
        part("ceilings", 15),
        part("TE: parity", 35),
        part("TE: slice in bf16", 45),
        part("TE: slice in FP8", 45),
        part("TE: shared prompts", 30),
        part("TE: grouped experts", 35),
        part("TE: gpt-oss", 30),
        part("TE: a mixture layer", 35),
    ),
    3: (
        *MODEL,
        *(
            training(f"vLLM {name}", 300, "pipo", "warm_start/export", *VLLM, *options)
            for name, options in {
                "bf16": (),
                "offload_trainer": ("rollout.offload_trainer=true",),
                "draft model": (f"vllm.speculative_config={DRAFTS}",),
                "FP8 cache": ("vllm.kv_cache_dtype=fp8", *ROUNDED),
                **{f"{name} weights": (f"vllm.quantization={name}", *ROUNDED) for name in FP8},
            }.items()
        ),
    ),
}


# ---- here


def pack(number: int, folder: Path, wheels: bool = True) -> int:
    """Fill the folder of a call: the package, the kit and wheels for Python 3.12 on Linux. Returns its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "wheels").mkdir(parents=True)
    for source in (path for pattern in FILES for path in ROOT.glob(pattern)):
        if source.is_file() and "__pycache__" not in source.parts:
            (folder / source.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / source.relative_to(ROOT))
    if wheels:
        download(folder / "wheels", WHEELS[number])
    if wheels and number == 2:
        for wheel in (folder / "wheels").glob("transformer_engine_cu*.whl"):
            cut(wheel)
        shutil.copy(compiled(), folder / "wheels")
    if wheels and number == 3:
        whole = PACKED / "vllm"
        whole.mkdir(exist_ok=True)
        download(whole, (f"vllm=={gpu_vllm.VLLM}", *gpu_vllm.NEEDED))
        gpu_vllm.pack(whole, folder / "wheels", cut_library)
    if lacking := needed(folder / "wheels"):
        raise SystemExit(f"the wheels of call {number} need {', '.join(sorted(lacking))} too: add them to WHEELS")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB")
    if size > LARGEST[number]:
        raise SystemExit(f"{folder} has more than {LARGEST[number] / 2**20:.0f} MiB")
    return size


def download(folder: Path, names: tuple[str, ...]) -> None:
    systems = [f"--platform=manylinux_2_{n}_x86_64" for n in range(5, 40)]
    systems += [f"--platform=manylinux{year}_x86_64" for year in (1, 2010, 2014)]
    kind = [
        "--no-deps",
        "--only-binary=:all:",
        "--python-version=3.12",
        "--implementation=cp",
        "--abi=cp312",
        "--abi=abi3",
    ]
    run_pip(sys.executable, "download", *kind, "--abi=none", "-d", str(folder), *systems, *names)


def needed(folder: Path) -> set[str]:
    """Return what the wheels of a folder require that they are not, and that torch and transformers do not bring."""
    wheels, there = sorted(folder.glob("*.whl")), ("torch", "transformers")
    present = {canonicalize_name(name) for name in (*there, *(wheel.name.split("-")[0] for wheel in wheels))}
    brought = required(line for name in there for line in importlib.metadata.requires(name) or ())
    asked = required(line for wheel in wheels for line in metadata_of(wheel).get_all("Requires-Dist") or ())
    return asked - present - brought - UNUSED


def required(lines: Iterable[str]) -> set[str]:
    place = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.3"}
    asked = map(Requirement, lines)
    return {canonicalize_name(r.name) for r in asked if r.marker is None or r.marker.evaluate(place)}


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def run_pip(python: str | Path, *arguments: str, **options) -> None:
    subprocess.run([str(python), "-m", "pip", "-q", *arguments], check=True, **options)


def compiled() -> Path:
    """Return Transformer Engine's extension for torch, which has no published wheel; compiles it once, for half an hour
    and more, in an environment of python3.12."""
    folder = PACKED / "compiled"
    if found := sorted(folder.glob("*.whl")):
        return found[0]
    subprocess.run(["python3.12", "-m", "venv", str(folder / "venv")], check=True)
    python, site = folder / "venv/bin/python", folder / "venv/lib/python3.12/site-packages"
    run_pip(python, "install", *COMPILER)
    given = {"CUDA_HOME": str(site / "nvidia" / "cu13"), "NVTE_BUILD_USE_NVIDIA_WHEELS": "1"}
    given["PATH"] = f"{python.parent}:{os.environ['PATH']}"
    package = f"transformer-engine-torch=={TE}"
    run_pip(python, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), package, env=os.environ | given)
    return next(folder.glob("*.whl"))


def cut(wheel: Path) -> None:
    """Write the wheel again with zeros in place of the code of other chips, which then takes no room."""
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(f"{wheel}.cut", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new,
    ):
        for item in old.infolist():
            data = old.read(item)
            new.writestr(item.filename, cut_library(data) if ".so" in item.filename else data)
    Path(f"{wheel}.cut").replace(wheel)


def cut_library(library: bytes, keep: int = 90, newer: int = 120) -> bytes:
    """Zeros in place of the code in a library's fat binaries that is not of the chip sm_`keep`, PTX included. Headers
    stay, so that the driver finds the chip's code where it was; those of PTX then name a `newer` chip, so that no
    driver compiles the zeros.

    A fat binary is a header of 16 bytes (its last 8 are the size of what follows) and entries: u16 kind (1 PTX, 2 ELF),
    u16, u32 size of the entry's header, u64 size of the code, 12 bytes, u32 chip."""
    data, magic = bytearray(library), struct.pack("<IHH", 0xBA55ED50, 1, 16)
    at = data.find(magic)
    while at >= 0:
        here, end = at + 16, at + 16 + struct.unpack_from("<Q", data, at + 8)[0]
        while here < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, here)
            if (kind, struct.unpack_from("<I", data, here + 28)[0]) != (2, keep):
                data[here + header : here + header + size] = bytes(size)
                if kind == 1:
                    struct.pack_into("<I", data, here + 28, newer)
            here += header + size
        at = data.find(magic, end)
    return bytes(data)


# ---- there


def install(state: Path, wheels: list[Path]) -> dict[str, str]:
    """Install the wheels into a folder of the call. Returns the environment of the checks."""
    paths = [str(state / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "VLLM_NO_USAGE_STATS": "1"}
    sys.path.append(str(state / "site"))  # where `can_run` looks
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # without it every process compiles all that it imports
    gpu_vllm.unpack([path for path in wheels if path.suffix == ".xz"], state / "site")
    if wheels := [path for path in wheels if path.suffix == ".whl"]:
        options = ["--no-index", "--no-deps", "--no-compile", "--target", str(state / "site")]
        done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", *options, *map(str, wheels)], timeout=60)
        folders = (str(folder) for folder in (state / "site", ROOT / "megatron_rft", ROOT / "tools"))
        code = [sys.executable, "-m", "compileall", "-q", "-j", "0", *folders]
        subprocess.run(code, timeout=60, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if not done.returncode:
            return environment
    print("no packed wheels are installed: the checks run with what is there", flush=True)
    return environment


def call(checks: tuple[Check, ...], results: Path, limit: float, wheels: list[Path], kept: Path | None = None) -> bool:
    """Run the checks within `limit` seconds; more than LIMIT stretches their budgets, and what one left of its own the
    next may use. `kept`: a folder for what the checks leave, which another call may go on from. Returns whether none
    failed."""
    end, passed, stretch = time.monotonic() + limit - RESERVE, True, max(1.0, limit / LIMIT)
    with tempfile.TemporaryDirectory(prefix="gpu_kit_", ignore_cleanup_errors=True) as folder:
        state = kept or Path(folder)
        state.mkdir(parents=True, exist_ok=True)
        environment = install(state, wheels)
        about = {"date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", "device": gpu()}
        about |= {"versions": versions(state), "command": f"python tools/gpu_kit.py {' '.join(sys.argv[1:3])}"}
        started: dict[str, subprocess.Popen] = {}
        for number, check in enumerate(checks):
            for near in [check, *(other for other in checks[number + 1 : number + 1 + AHEAD] if other.waits)]:
                if near.name not in started and can_run(near):
                    started[near.name] = start(near, state, environment)
            left, later = end - time.monotonic(), sum(other.budget for other in checks[number + 1 :]) * stretch
            seconds = max(min(check.budget * stretch, left), left - later)
            record = run(check, started.get(check.name), state, seconds)
            passed &= record["status"] == "passed" or record["status"].startswith("not run: ")
            write(results, {"check": check.name} | record | about)
    return passed


def can_run(check: Check) -> bool:
    return not check.needs or importlib.util.find_spec(check.needs) is not None


def log_of(check: Check, state: Path) -> Path:
    return state / f"{underscored(check.name)}.log"


def start(check: Check, state: Path, environment: dict[str, str]) -> subprocess.Popen:
    command = [sys.executable, *(argument.format(state=state) for argument in check.arguments)]
    with log_of(check, state).open("w") as out:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            text=True,
            start_new_session=True,
        )


def run(check: Check, process: subprocess.Popen | None, state: Path, seconds: float) -> dict:
    """Let a check run; after `seconds` it is killed with all processes that it started, and what it printed counts."""
    if seconds <= 0 and process is not None:
        end_group(process)
    if seconds <= 0 or process is None:
        why = "no time was left" if seconds <= 0 else f"{check.needs} is not installed"
        return {"status": f"not run: {why}", "seconds": 0.0, "rows": []}
    begin = time.monotonic()
    try:
        process.communicate("begin\n", timeout=seconds)
        status = "passed" if process.returncode == 0 else f"FAILED: exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        status = f"FAILED: killed after {seconds:.0f} s"
    end_group(process)
    text = log_of(check, state).read_text(errors="replace")
    if process.returncode == MISSING:
        status = f"not run: {text.strip().splitlines()[-1]}"
    elif status != "passed":
        print(text[-3000:], flush=True)
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), "rows": rows(text, state, check.name)}


def end_group(process: subprocess.Popen) -> None:
    """Kill a check and the processes that it left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def rows(text: str, state: Path, name: str) -> list[list[str]]:
    """What a check found, as [what, found, beside]: the rows that it printed, and the figures of a run's steps."""
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line] for line in lines if len(line) == 3]
    metrics = state / underscored(name) / "metrics.jsonl"
    for line in metrics.read_text().splitlines() if metrics.is_file() else []:
        step = json.loads(line)
        keys = (
            "policy/loss",
            "policy/grad_norm",
            "reward/mean",
            "mismatch/kl",
            "speculation/accepted",
            "memory/peak_gib",
        )
        shown = ", ".join(f"{key} {step[key]:.4g}" for key in keys if key in step)
        if shown and "seconds/step" in step:
            found.append([f"step {step['step']}", shown, f"{step['seconds/step']:.2f} s"])
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
    there = reversed([*importlib.metadata.distributions(path=paths)])
    found = {str(canonicalize_name(each.metadata["Name"])): each.version for each in there}
    return f"Python {sys.version.split()[0]}, " + ", ".join(f"{n} {found[n]}" for n in NAMES if n in found)


# ---- the page


def report(results: Path, page: Path, predicted: Path = PREDICTED) -> None:
    """Write the newest line of each check that ran on a GPU between the page's marks, beside what was predicted, and
    beside the newest that ran without one."""
    records = [json.loads(line) for line in results.read_text().splitlines()]
    newest = {record["check"]: record for record in records if record["device"]}
    if not newest:
        raise SystemExit(f"{results} has no line that was measured on a GPU: {page} stays as it is")
    tables, lines = json.loads(predicted.read_text()), []
    for check, record in newest.items():
        lines += [
            f"### {check}",
            "",
            f"`{record['command']}`, {record['date']}, {record['device']}, {record['versions']}: ",
        ]
        lines[-1] += f"{record['status']}, {record['seconds']} s."
        chip = next((name for name in ("H100", "H200") if name in record["device"]), "")
        beside = [tables.get(name, {}).get(check, {}) for name in (chip, f"{chip} rehearsed", "CPU")]
        found = record["rows"] if len(record["rows"]) <= LONGEST else record["rows"][:2] + record["rows"][-2:]
        pairs = zip(PREDICTORS, beside, strict=True)
        shown = {name: table for name, table in pairs if any(what in table for what, *_ in found)}
        if found:
            lines += [
                "",
                f"| {' | '.join(('what', 'measured', *shown, 'beside'))} |",
                "|" + " --- |" * (3 + len(shown)),
            ]
        for what, value, near in found:
            lines.append(f"| {' | '.join((what, value, *(table.get(what, '') for table in shown.values()), near))} |")
        lines.append("")
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")


def keep_cpu(results: Path, predicted: Path = PREDICTED) -> None:
    """Put what the quickstart's runs gave without a GPU into the table of predictions."""
    records = [json.loads(line) for line in results.read_text().splitlines()]
    runs = {
        r["check"]: {what: f"{found}, {near}" for what, found, near in r["rows"]} for r in records if not r["device"]
    }
    table = json.loads(predicted.read_text())
    table["CPU"] = {name: rows for name, rows in runs.items() if name.startswith("quickstart")}
    predicted.write_text(json.dumps(table, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a GPU shows in calls of five minutes.")
    parser.add_argument("what", choices=("pack", "call", "report", "keep-cpu"))
    parser.add_argument("number", nargs="*", type=int, help="of pack and call: 1, 2, 3")
    parser.add_argument("--only", nargs="+", default=[""], help="of call: checks whose name has one of these in it")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--state", type=Path, help="of call: a folder that is kept, with models that later calls need")
    parser.add_argument("--limit", type=float, help=f"seconds of a call; {LIMIT}, of call 3 those of all its checks")
    args = parser.parse_args()
    if unknown := set(args.number) - set(WHEELS if args.what == "pack" else CALLS):
        parser.error(f"there is no call {min(unknown)} to {args.what}")
    if args.what == "pack":
        for number in args.number:
            pack(number, PACKED / str(number))
    elif args.what == "call":
        passed = True
        for number in args.number:
            checks = tuple(check for check in CALLS[number] if any(o in check.name for o in args.only))
            limit = args.limit or (LIMIT if number < 3 else sum(check.budget for check in checks) + RESERVE)
            folder = ROOT / "wheels" if (ROOT / "wheels").is_dir() else PACKED / str(number) / "wheels"
            packed = [*sorted(folder.glob("*.whl")), *sorted(folder.glob("*.xz"))]
            passed &= call(checks, args.results or RESULTS, limit, packed, args.state)
        sys.exit(not passed)
    else:
        report(args.results or MEASURED, PAGE) if args.what == "report" else keep_cpu(args.results or RESULTS)


if __name__ == "__main__":
    main()
