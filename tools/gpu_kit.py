"""What a GPU shows in calls of five minutes, where one is lent for a quarter of an hour without a network:

    python tools/gpu_kit.py pack 1 [2] [3]     here: all that a call needs, into the folder build/gpu_kit/1
    python build/gpu_kit/1/tools/gpu_kit.py call 1 --results FILE     there: runs the checks, adds a line for each
    python tools/gpu_kit.py report             docs/gpu_results.md from tools/gpu_measured.jsonl

docs/gpu_results.md says what the other machine has, what each check measures, and how a call ends in time. Call 1 uses
torch's layers, call 2 Transformer Engine's, and call 3 vLLM.
"""

import argparse
import compileall
import contextlib
import datetime
import json
import lzma
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_rft.utils.files import flush, read_json_lines  # noqa: E402
from megatron_rft.utils.processes import end_reaper, start_helper  # noqa: E402

MEASURED, PREDICTED = ROOT / "tools" / "gpu_measured.jsonl", ROOT / "tools" / "gpu_predicted.json"
CHECKS, PAGE, PACKED = "tools/gpu_checks.py", ROOT / "docs" / "gpu_results.md", ROOT / "build" / "gpu_kit"
LIMIT, RESERVE, MISSING = 300, 30, 77  # seconds of a call, and left at its end; exit status: something is not here
AHEAD = 3  # checks after the present one whose processes import already
LONGEST = 40  # rows of a check that the page has in full, of others the first and the last two
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
VERSIONS = ("torch", "transformers", "megatron-core", "transformer-engine", "vllm", "pydantic", "triton")
METRICS = ("policy/loss", "policy/grad_norm", "reward/mean", "mismatch/kl", "speculation/accepted", "memory/peak_gib")

TRAINED = "pipo.yaml model.path=FOLDER/warm_start/export run.steps=5 evaluation.every=null data.validation=null "
GRPO = TRAINED + "rollout.engine=hf "
# every weight of the engine is compared with the trainer's after each sync, and a larger KL than the bound ends the run
VLLM = TRAINED + "rollout.engine=vllm model.precision=bf16 faults.compare_weights_every=1 faults.on_mismatch=stop "
VLLM += 'vllm.kernel_config={"enable_jit_warmup":false} faults.mismatch_kl=0.01 '
DRAFT = '{"method":"draft_model","model":"FOLDER/warm_start/export","num_speculative_tokens":4}'
ROUNDED = VLLM + "faults.mismatch_kl=0.05 algorithm.importance=truncated "
SFT = "sft.yaml model.path=FOLDER/model run.steps=100 run.epochs=null optimizer.lr_warmup_steps=0 rollout.engine=hf"
# name: seconds, function of gpu_checks.py, its arguments. The most valuable first, with seconds to spare, which later
# ones use; those of call 1 and of call 2 have LIMIT - RESERVE together. The first of a call imports in its own time.
CALLS = {
    1: {
        "ceilings": (40, "ceilings"),
        "warm start": (75, "run", SFT),
        "quickstart fp32": (25, "run", GRPO),
        "quickstart bf16": (25, "run", GRPO + "model.precision=bf16"),
        "gradients against the CPU": (30, "parity", "dense/shared prompts", "fp32/bf16"),
        "log-probs against float64": (10, "logprobs_in_float64"),
        "slice of Qwen3-8B": (40, "speed", "bf16"),
        "weights to an engine process": (10, "engine_process"),
        "log-probs: time and memory": (5, "logprob_speed"),
        "offload of the trainer": (10, "offload"),
    },
    2: {
        "ceilings": (40, "ceilings"),
        "TE: parity": (35, "parity", "dense", "bf16/fp8"),
        "TE: slice in bf16": (45, "speed", "bf16"),
        "TE: slice in FP8": (30, "speed", "fp8"),
        "TE: shared prompts": (30, "parity", "shared prompts", "bf16"),
        "TE: grouped experts": (30, "parity", "mixture", "bf16/fp8"),
        "TE: gpt-oss": (25, "parity", "gpt-oss", "bf16"),
        "TE: a mixture layer": (35, "speed", "bf16", "mixture"),
    },
    3: {
        "warm start": (300, "run", SFT),
        "vLLM bf16": (300, "run", VLLM),
        "vLLM offload_trainer": (300, "run", VLLM + "rollout.offload_trainer=true"),
        "vLLM draft model": (300, "run", VLLM + f"vllm.speculative_config={DRAFT}"),
        "vLLM FP8 cache": (300, "run", ROUNDED + "vllm.kv_cache_dtype=fp8"),
        "vLLM fp8 weights": (300, "run", ROUNDED + "vllm.quantization=fp8"),
        "vLLM fp8_per_channel weights": (300, "run", ROUNDED + "vllm.quantization=fp8_per_channel"),
        "vLLM fp8_per_block weights": (300, "run", ROUNDED + "vllm.quantization=fp8_per_block"),
    },
}


# ---- packing: the packages that the other machine lacks, for its Python 3.12, as requirements-gpu.lock has them. Of a
# library's code for many chips only that of sm_90, without what a dense model in bf16 or FP8 on Hopper never loads.

LARGEST = {1: 15, 2: 60, 3: 60}  # MiB to carry
BASE = "megatron-core pydantic pydantic-core annotated-types typing-inspection psutil cloudpickle pillow "
# All that these import beside what an image with torch and transformers has (for vLLM also aiohttp, httpx, numba,
# opencv, protobuf, sentencepiece, tiktoken and the like): pip adds nothing.
PACKAGES = {
    1: BASE,
    2: BASE + "transformer-engine transformer-engine-cu13 transformer-engine-torch einops nvdlfw-inspect onnx onnx-ir "
    "onnxscript ml-dtypes protobuf importlib-metadata lazy-importer zipp",
    3: BASE + "vllm apache-tvm-ffi cachetools cbor2 compressed-tensors fastapi httpx2 llguidance loguru msgspec openai "
    "oss-harmony partial-json-parser pybase64 pyzmq sniffio starlette xgrammar",
}
# also libraries that need symbols of torch 2.13 or are for Blackwell; Hopper has FlashAttention 3
LEFT_OUT = re.compile(
    "bin/|vllm/(vllm-rs|benchmarks/|model_executor/layers/fused_moe/configs/|third_party/(deep_gemm|fmha_sm100)/|"
    "_qutlass_C|_deepselect_C|_flashkda_C|_flashmla|vllm_flash_attn/_vllm_fa2_C)"
)
WINDOW = 192 << 20  # bytes: libraries for one chip repeat themselves far apart


def pack(number: int, folder: Path, packages: bool = True) -> int:
    """Fill the folder of a call. Returns its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("megatron_rft", "examples/quickstart", "tools/bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("tools/gpu_*"):
        shutil.copy(file, folder / "tools")
    if packages:
        with tempfile.TemporaryDirectory() as site:
            command = [sys.executable, "-m", "pip", "-q", "install", "--target", site, *PACKAGES[number].split()]
            command += ["--no-deps", "--no-compile", "--only-binary=:all:", "--python-version=3.12"]
            command += ["-c", str(ROOT / "requirements-gpu.lock"), "--find-links", str(PACKED / "compiled")]
            subprocess.run(command, check=True)
            archive(Path(site), folder / "site.tar.xz")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB")
    if size > LARGEST[number] << 20:
        raise SystemExit(f"{folder} has more than {LARGEST[number]} MiB")
    return size


def archive(site: Path, target: Path) -> None:
    """Pack a folder of packages. Files of one kind lie beside each other, in a window that spans many."""
    files = [file for file in site.rglob("*") if file.is_file() and not LEFT_OUT.match(str(file.relative_to(site)))]
    how = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": WINDOW}]
    with lzma.open(target, "wb", filters=how) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for file in sorted(files, key=lambda file: (file.suffix, file)):
            if ".so" in file.name:
                file.write_bytes(cut(file.read_bytes()))
            tar.add(file, file.relative_to(site))


def cut(library: bytes, keep: int = 90, newer: int = 120) -> bytes:
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


# ---- a call


def call(checks: dict[str, tuple], results: Path, limit: float, packages: Path, program: str = CHECKS) -> bool:
    """Run the checks within `limit` seconds; what one left of its budget the next may use. True if none failed."""
    end, later = time.monotonic() + limit - RESERVE, sum(budget for budget, *_ in checks.values())
    passed, started = True, {}
    with tempfile.TemporaryDirectory(prefix="gpu_kit_", ignore_cleanup_errors=True) as folder:
        given = {"cwd": ROOT, "env": unpack(packages, Path(folder, "site")), "stdin": subprocess.PIPE, "text": True}
        about = machine() | {"command": f"python tools/gpu_kit.py {' '.join(sys.argv[1:3])}"}
        for number, (name, (budget, *_)) in enumerate(checks.items()):
            for near in [*checks][len(started) : number + 1 + AHEAD]:
                log = Path(folder, near.replace(" ", "_") + ".log")  # a run's folder has its name without the ending
                command = [sys.executable, program, *checks[near][1:], near, folder]
                started[near] = start_helper(command, reap=True, log=log, **given), log
            left, later = end - time.monotonic(), later - budget
            record = run(*started[name], max(min(budget, left), left - later))
            passed &= record["status"].startswith(("passed", "not run: "))
            write(results, {"check": name} | record | about)
    return passed


def unpack(packages: Path, site: Path) -> dict[str, str]:
    """Unpack the packages that were carried, if there are some. Returns the environment of the checks."""
    if packages.exists():
        shutil.unpack_archive(packages, site)
        for each in (site, ROOT / "megatron_rft", ROOT / "tools"):
            compileall.compile_dir(each, quiet=2, workers=0)
    sys.path.insert(0, str(site))  # where `machine` looks
    paths = ":".join(map(str, (site, ROOT, ROOT / "tools" / "bench", os.environ.get("PYTHONPATH", ""))))
    given = {"PYTHONPATH": paths, "PYTHONFAULTHANDLER": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return os.environ | given | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def run(process: subprocess.Popen, log: Path, seconds: float) -> dict:
    """Let a check begin, which has imported and waits for a line: when it will be killed, after `seconds`, with all
    processes that it started. What it printed counts."""
    begin, code = time.monotonic(), None
    if seconds > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(f"{begin + seconds}\n", timeout=seconds)
            code = process.returncode
    end_reaper(process)
    text = log.read_text(errors="replace")
    killed = f"FAILED: killed after {seconds:.0f} s" if seconds > 0 else "not run: no time was left"
    known = {0: "passed", MISSING: f"not run: {text.strip().rpartition(chr(10))[2]}", None: killed}
    status = known.get(code, f"FAILED: exit status {code}")
    if status.startswith("FAILED"):
        print(text[-6000:], flush=True)
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), "rows": [*rows(log)]}


def rows(log: Path) -> Iterator[list[str]]:
    """What a check found, as [what, found, beside]: the rows that it printed, and the figures of a run's steps."""
    yield from (row for row in read_json_lines(log) if isinstance(row, list))
    for step in read_json_lines(log.with_suffix("") / "metrics.jsonl"):
        if "seconds/step" in step:
            known = {key: math.nan if step[key] is None else step[key] for key in METRICS if key in step}
            shown = ", ".join(f"{key} {value:.4g}" for key, value in known.items())
            yield [f"step {step['step']}", shown, f"{step['seconds/step']:.2f} s"]


def write(results: Path, record: dict) -> None:
    """A line in the output and in the file at once; a full disk does not end the call."""
    line = json.dumps(record)
    print(line, flush=True)
    try:
        results.parent.mkdir(parents=True, exist_ok=True)
        with results.open("a") as file:
            print(line, file=file)
        flush(results)
    except OSError as error:
        print(f"{results} could not be written ({error}): the line above is all there is", flush=True)


def machine() -> dict[str, str]:
    """What a result says of where it was measured. nvidia-smi names the GPU: torch would keep memory of it."""
    status, names = subprocess.getstatusoutput("nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null")
    there = {each.name.lower().replace("_", "-"): each.version for each in reversed([*metadata.distributions()])}
    versions = [f"Python {sys.version.split()[0]}", *(f"{name} {there[name]}" for name in VERSIONS if name in there)]
    date, device = f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", "" if status else names.partition("\n")[0].strip()
    return {"date": date, "device": device, "versions": ", ".join(versions)}


# ---- the page


def report(results: Path, page: Path) -> None:
    """Write each check's newest line of a GPU between the page's marks, beside predictions and its newest of a CPU."""
    newest = {(bool(record["device"]), record["check"]): record for record in read_json_lines(results)}
    predicted, text = json.loads(PREDICTED.read_text()), ""
    for check, record in ((check, record) for (on_gpu, check), record in newest.items() if on_gpu):
        chip = next((name for name in predicted if name in record["device"]), None)
        tables = {column: table.get(check, {}) for column, table in predicted.get(chip, {}).items()}
        cpu = newest.get((False, check), {"rows": []})["rows"]
        tables["on a CPU"] = {what: f"{found}, {near}" for what, found, near in cpu}
        text += "\n".join(section(record, tables)) + "\n"
    if not text:
        raise SystemExit(f"{results} has no line that was measured on a GPU: {page} stays as it is")
    before, _, after = re.split(f"{BEGIN}|{END}", page.read_text())
    page.write_text(f"{before}{BEGIN}\n\n{text}{END}{after}")


def section(record: dict, tables: dict[str, dict[str, str]]) -> Iterator[str]:
    """Yield a check's lines. A table's column stands where one of the check's figures is in it."""
    yield from (f"### {record['check']}", "")
    yield "`{command}`, {date}, {device}, {versions}: {status}, {seconds} s.\n".format(**record)
    rows = record["rows"] if len(record["rows"]) <= LONGEST else record["rows"][:2] + record["rows"][-2:]
    shown = {kind: table for kind, table in tables.items() if any(what in table for what, *_ in rows)}
    cells = [[what, found, *(table.get(what, "") for table in shown.values()), near] for what, found, near in rows]
    head = ["what", "measured", *shown, "beside"]
    if rows:
        yield from (f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells))
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description="What a GPU shows in calls of five minutes.")
    parser.add_argument("what", choices=("pack", "call", "report"))
    parser.add_argument("numbers", nargs="*", type=int, help="of pack and call: 1, 2, 3")
    parser.add_argument("--only", nargs="+", default=[""], help="of call: checks whose name has one of these in it")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "gpu_kit.jsonl", help="of call")
    parser.add_argument("--limit", type=float, help=f"seconds of a call; {LIMIT}, of call 3 those of all its checks")
    args = parser.parse_args()
    if not CALLS.keys() >= {*args.numbers}:
        parser.error(f"there are the calls {', '.join(map(str, CALLS))}")
    if args.what == "report":
        report(MEASURED, PAGE)
    passed = True
    for number in args.numbers:
        if args.what == "pack":
            pack(number, PACKED / str(number))
            continue
        checks = {name: check for name, check in CALLS[number].items() if any(word in name for word in args.only)}
        limit = args.limit or max(LIMIT, sum(budget for budget, *_ in checks.values()) + RESERVE)
        passed &= call(checks, args.results, limit, ROOT / "site.tar.xz")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
