"""What a GPU shows in calls of five minutes, where one is lent for a quarter of an hour without a network:

    python tools/gpu_pack.py 1 [2] [3]         here: all that a call needs, into the folder build/gpu_kit/1
    python build/gpu_kit/1/tools/gpu_kit.py call 1 --results FILE     there: runs the checks, adds a line for each
    python tools/gpu_kit.py report             docs/gpu_results.md from tools/gpu_measured.jsonl

The other machine has Python 3.12 with torch 2.11 for CUDA 13, transformers 5.17, numpy and safetensors. Call 1 uses
torch's layers, call 2 Transformer Engine's, and call 3 vLLM. Each check has a process of its own and a budget in
seconds, and its line is on the disk and in the output before the next one starts. A check that fails, hangs or dies
does not stop the next. A call ends 30 s before its limit. Without a GPU the checks run at their smallest size.
"""

import argparse
import compileall
import contextlib
import datetime
import json
import math
import os
import shutil
import signal
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

from megatron_rft.utils.files import read_json_lines  # noqa: E402

MEASURED, PREDICTED = ROOT / "tools" / "gpu_measured.jsonl", ROOT / "tools" / "gpu_predicted.json"
PAGE = ROOT / "docs" / "gpu_results.md"
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
# name: seconds, function of gpu_checks.py, its arguments. The most valuable first; those of call 1 and of call 2 have
# LIMIT - RESERVE together
CALLS = {
    1: {
        "ceilings": (25, "ceilings"),
        "warm start": (50, "run", SFT),
        "quickstart fp32": (20, "run", GRPO),
        "quickstart bf16": (20, "run", GRPO + "model.precision=bf16"),
        "gradients against the CPU": (30, "parity", "dense/shared prompts", "fp32/bf16"),
        "log-probs against float64": (15, "logprobs_in_float64"),
        "slice of Qwen3-8B": (55, "speed", "bf16"),
        "weights to an engine process": (20, "engine_process"),
        "log-probs: time and memory": (15, "logprob_speed"),
        "offload of the trainer": (20, "offload"),
    },
    2: {
        "ceilings": (25, "ceilings"),
        "TE: parity": (35, "parity", "dense", "bf16/fp8"),
        "TE: slice in bf16": (45, "speed", "bf16"),
        "TE: slice in FP8": (45, "speed", "fp8"),
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
Checks = dict[str, tuple[float, list[str]]]  # by name: seconds, arguments of Python without the name and the folder


# ---- a call


def call(checks: Checks, results: Path, limit: float, archive: Path) -> bool:
    """Run the checks within `limit` seconds; what one left of its budget the next may use. Returns whether none
    failed."""
    end, later = time.monotonic() + limit - RESERVE, sum(budget for budget, _ in checks.values())
    passed, started = True, {}
    with tempfile.TemporaryDirectory(prefix="gpu_kit_", ignore_cleanup_errors=True) as folder:
        environment = unpack(archive, Path(folder, "site"))
        about = {"date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", "device": gpu(), "versions": versions()}
        about |= {"command": f"python tools/gpu_kit.py {' '.join(sys.argv[1:3])}"}
        for number, (name, (budget, _)) in enumerate(checks.items()):
            for near in [*checks][len(started) : number + 1 + AHEAD]:
                started[near] = start([*checks[near][1], near, folder], log_of(folder, near), environment)
            left, later = end - time.monotonic(), later - budget
            record = run(started[name], log_of(folder, name), max(min(budget, left), left - later))
            passed &= record["status"].startswith(("passed", "not run: "))
            write(results, {"check": name} | record | about)
    return passed


def unpack(archive: Path, site: Path) -> dict[str, str]:
    """Unpack the packages that were carried, if there are some. Returns the environment of the checks."""
    if archive.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(site, filter="data")
        for each in (site, ROOT / "megatron_rft", ROOT / "tools"):
            compileall.compile_dir(each, quiet=2, workers=0)
    sys.path.insert(0, str(site))  # where `versions` looks
    paths = *map(str, (site, ROOT, ROOT / "tools" / "bench")), os.environ.get("PYTHONPATH", "")
    given = {"PYTHONPATH": ":".join(paths), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return os.environ | given | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


def log_of(folder: str, name: str) -> Path:
    """The output of a check. A run's own folder has the same name without the ending."""
    return Path(folder, name.replace(" ", "_") + ".log")


def start(arguments: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen:
    """Start a check. It imports, and waits for a line before its work."""
    with log.open("w") as out:
        pipes = {"stdin": subprocess.PIPE, "stdout": out, "stderr": out, "text": True, "start_new_session": True}
        return subprocess.Popen([sys.executable, *arguments], cwd=ROOT, env=environment, **pipes)


def run(process: subprocess.Popen, log: Path, seconds: float) -> dict:
    """Let a check run; after `seconds` it is killed with all processes that it started, and what it printed counts."""
    begin, code = time.monotonic(), None
    if seconds > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate("begin\n", timeout=seconds)
            code = process.returncode
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    text = log.read_text(errors="replace")
    killed = f"FAILED: killed after {seconds:.0f} s" if seconds > 0 else "not run: no time was left"
    status = {0: "passed", MISSING: f"not run: {text.strip().rpartition(chr(10))[2]}", None: killed}
    record = {"status": status.get(code, f"FAILED: exit status {code}"), "seconds": round(time.monotonic() - begin, 1)}
    if record["status"].startswith("FAILED"):
        print(text[-3000:], flush=True)
    return record | {"rows": [*rows(log)]}


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
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        print(f"{results} could not be written ({error}): the line above is all there is", flush=True)


def gpu() -> str:
    """The name of the first GPU, without torch, which would keep memory of it; "" without one."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = shutil.which(query[0]) and subprocess.run(query, capture_output=True, text=True)
    return done.stdout.partition("\n")[0].strip() if done and not done.returncode else ""


def versions() -> str:
    there = {each.name.lower().replace("_", "-"): each.version for each in reversed([*metadata.distributions()])}
    return ", ".join([f"Python {sys.version.split()[0]}", *(f"{n} {there[n]}" for n in VERSIONS if n in there)])


# ---- the page


def report(results: Path, page: Path) -> None:
    """Write the newest line of each check that ran on a GPU between the page's marks, beside what was predicted and
    what its newest line of a CPU has."""
    newest = {(bool(record["device"]), record["check"]): record for record in read_json_lines(results)}
    measured = [record for (on_gpu, _), record in newest.items() if on_gpu]
    if not measured:
        raise SystemExit(f"{results} has no line that was measured on a GPU: {page} stays as it is")
    predicted, text = json.loads(PREDICTED.read_text()), ""
    for record in measured:
        check, chip = record["check"], next((chip for chip in ("H100", "H200") if chip in record["device"]), "")
        cpu = {what: f"{found}, {near}" for what, found, near in newest.get((False, check), {"rows": []})["rows"]}
        tables = {"plan and floors": predicted.get(chip, {}).get(check, {}), "on a CPU": cpu}
        tables["rehearse"] = predicted.get(f"{chip} rehearsed", {}).get(check, {})
        text += "\n".join(section(record, tables)) + "\n"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{text}{END}{rest.split(END)[1]}")


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
    parser.add_argument("what", choices=("call", "report"))
    parser.add_argument("numbers", nargs="*", type=int, help="of call: 1, 2, 3")
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
        chosen = {name: check for name, check in CALLS[number].items() if any(word in name for word in args.only)}
        checks = {name: (budget, ["tools/gpu_checks.py", *rest]) for name, (budget, *rest) in chosen.items()}
        limit = args.limit or max(LIMIT, sum(budget for budget, _ in checks.values()) + RESERVE)
        passed &= call(checks, args.results, limit, ROOT / "site.tar.xz")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
