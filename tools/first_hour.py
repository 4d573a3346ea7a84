"""Packs, runs and reports the parts of first_hour.sh."""

import argparse
import datetime
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKED = ROOT / "build" / "first_hour"
STATE = Path(os.environ.get("FIRST_HOUR_STATE") or Path(tempfile.gettempdir(), "first_hour"))
LARGEST, LIMIT = 60_000_000, 570  # bytes that a part brings; seconds of a part
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"

# ---- what the parts bring

TE_TORCH = "transformer-engine-torch==2.20.2"  # a source: its extension is compiled there, from part 1 on
WHEELS = {  # part: what is not on the other machine
    1: """megatron-core==0.16.1 pydantic==2.14.4 pydantic-core==2.50.5
        annotated-types importlib-metadata==10.2.0 nvdlfw-inspect==0.2.2 lazy-importer==0.1.0""",
    6: """apache-tvm-ffi==0.1.15.post2 cachetools==8.0.1 cbor2==6.2.1 compressed-tensors==0.17.0 fastapi==0.136.3
        llguidance==1.7.6 model-hosting-container-standards==0.1.16 msgspec==0.22.0 openai==3.54.0 oss-harmony==0.0.11
        partial-json-parser==0.2.1.1.post7 prometheus-fastapi-instrumentator==8.1.0 pybase64==1.5.1 pyzmq==27.3.0
        uvicorn==0.54.0 watchfiles==1.3.0 xgrammar==0.2.8 blake3==1.0.11 httpx2==2.16.2 httpcore2==2.16.2 jiter==0.19.0
        starlette==1.10.0 supervisor==4.3.0 jmespath==1.1.0 loguru==0.7.3 sniffio==1.3.1 truststore==0.10.5""",
}
LARGE = {"transformer-engine-cu13==2.20.2": range(1, 6), "vllm==0.32.0": range(6, 9)}  # in pieces
FIRST_PIECE, PIECE = {1: 45_000_000, 6: 30_000_000}, 59_500_000  # the first one is beside wheels
UNUSED = ("vllm/vllm_flash_attn/_vllm_fa2_C", "vllm/vllm-rs")  # attention before Hopper, and a server


def download(folder: Path, names: list[str], *options: str, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *options, *names]
    subprocess.run(command, check=True, env=os.environ | environment)


def wheels(folder: Path, names: list[str]) -> None:
    """Download wheels for Python 3.12 on Linux."""
    systems = [f"--platform=manylinux_2_{n}_x86_64" for n in range(5, 40)]
    systems += [f"--platform=manylinux{year}_x86_64" for year in (1, 2010, 2014)]
    download(folder, names, "--only-binary=:all:", "--python-version=3.12", "--implementation=cp", *systems)


def source(folder: Path, name: str) -> None:
    """Download a source whose metadata asks torch for its CUDA version, also where torch is a CPU build."""
    with tempfile.TemporaryDirectory() as early:
        Path(early, "sitecustomize.py").write_text("import torch\ntorch.version.cuda = torch.version.cuda or '13.0'\n")
        download(folder, [name], "--no-binary=:all:", "--no-build-isolation", PYTHONPATH=early)


def large(name: str) -> Path:
    """Return the wheel; where nothing here uses some of it, without that and packed anew (once; minutes)."""
    cache = PACKED / "downloads"
    packed = cache / f"{name}.whl"
    if not packed.exists():
        wheels(cache / name, [name])
        whole = next((cache / name).iterdir())
        (cache / f"{name}.name").write_text(whole.name)
        with zipfile.ZipFile(whole) as old:
            if any(file.startswith(UNUSED) for file in old.namelist()):
                with zipfile.ZipFile(cache / "new", "w", zipfile.ZIP_LZMA) as new:
                    for file in old.namelist():
                        if not file.startswith(UNUSED):
                            new.writestr(file, old.read(file))
                whole = cache / "new"
        os.rename(whole, packed)
    return packed


def pack(part: int) -> None:
    folder = PACKED / str(part)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if part in WHEELS:
        wheels(folder, WHEELS[part].split())
    if part == 1:
        source(folder, TE_TORCH)
    name, parts = next((name, parts) for name, parts in LARGE.items() if part in parts)
    whole = large(name)
    with whole.open("rb") as file:
        file.seek(FIRST_PIECE[parts[0]] + (part - parts[0] - 1) * PIECE if part > parts[0] else 0)
        (folder / f"{name}.{part}").write_bytes(file.read(FIRST_PIECE.get(part, PIECE)))
        if part == parts[-1] and file.read(1):
            raise SystemExit(f"{whole} is too large for parts {parts[0]} to {part}: leave out more of it (UNUSED)")
    if part == parts[-1]:
        shutil.copy(PACKED / "downloads" / f"{name}.name", folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    if size > LARGEST:
        raise SystemExit(f"part {part} brings {size / 1e6:.1f} MB, more than {LARGEST / 1e6:.0f}: {folder}")
    print(f"{folder.relative_to(ROOT)}: {size / 1e6:.1f} MB")


# ---- what the parts run


def checks(*names: str) -> list[str]:
    return ["tools/gpu_checks.py", "--out", str(STATE / "checks"), "--only", *names]


RECIPES = "examples/quickstart"
RUN = ["-m", "megatron_rft", "train"]
SHARED = ["tools/bench/shared_prompts.py", "--shapes", "1024x8x128"]
CHECKS: dict[int, dict[str, list[str]]] = {
    1: {
        "ceilings, accuracy": checks("versions", "ceilings", "against float64"),
        "parity, torch's layers": checks("torch layers, against"),
        "weights to an engine's process": checks("CUDA IPC", "shared host memory"),
    },
    2: {"log-probs": checks("log-probs: ")},
    3: {
        "throughput, torch's layers": checks("torch layers, throughput"),
        "shared prompts, torch's layers": [*SHARED, "{small}"],
    },
    4: {
        "decoding, hf engine": checks("decoding, hf"),
        "training": checks("bf16 training"),
        "quickstart: model": [f"{RECIPES}/make_model.py", "{state}/model"],
        "quickstart: sft": [
            *[*RUN, f"{RECIPES}/sft.yaml", "run.output_dir={state}/sft", "model.path={state}/model"],
            *["{few}", "{no_epochs}", "{no_warmup}"],
        ],
        "quickstart: PIPO": [
            *[*RUN, f"{RECIPES}/pipo.yaml", "run.output_dir={state}/pipo", "model.path={state}/sft/export"],
            *["rollout.engine=hf", "{few}"],
        ],
    },
    5: {
        "parity, Transformer Engine": checks("Transformer Engine layers, against"),
        "throughput, Transformer Engine": checks("Transformer Engine, throughput"),
        "a step's kernels": checks("kernels of a step"),
        "fp8 training": checks("fp8 training"),
    },
    6: {"shared prompts, Transformer Engine": [*SHARED, "{small}"]},
    7: {"fp8 throughput": checks("fp8 throughput")},
    8: {
        "vLLM: sleep, wake, sync, KL": checks("colocated vLLM", "vLLM in bf16"),
        "vLLM: decoding": checks("decoding, vLLM"),
        "vLLM: the other checks": checks("vLLM with", "two vLLM", "offload_trainer"),
    },
}  # fmt: skip


def gpu() -> str:
    """Return the name of the first GPU, without torch, which would keep memory of it; "" without one."""
    if not shutil.which("nvidia-smi"):
        return ""
    done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return done.stdout.splitlines()[0].strip() if not done.returncode and done.stdout.strip() else ""


def pip(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", *arguments]


def unpack(part: int, environment: dict[str, str]) -> None:
    """Take what the part brought, install it, and start the compiler."""
    folder = PACKED / str(part)
    if not folder.exists():
        print(f"{folder} is not here: part {part} runs with what is installed", flush=True)
        return
    STATE.mkdir(parents=True, exist_ok=True)
    for file in folder.iterdir():
        shutil.copy(file, STATE)
    for name, parts in LARGE.items():
        pieces = [STATE / f"{name}.{number}" for number in parts]
        if part in parts and all(piece.exists() for piece in pieces) and (STATE / f"{name}.name").exists():
            with (STATE / (STATE / f"{name}.name").read_text()).open("wb") as whole:
                for piece in pieces:
                    whole.write(piece.read_bytes())
    install = pip("install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", f"{STATE}/site")
    new = [file for file in STATE.glob("*.whl") if not (STATE / f"{file.name}.in").exists()]
    if new:
        subprocess.run([*install, *map(str, new)], check=True)
        for file in new:
            (STATE / f"{file.name}.in").touch()
    if part == 1 and gpu():
        build = pip("wheel", "-q", "--no-index", "--no-deps", "--no-build-isolation", "-w", str(STATE / "built"))
        jobs = str(max(1, (os.cpu_count() or 3) - 2))
        extra = {"NVTE_FRAMEWORK": "pytorch", "NVTE_BUILD_USE_NVIDIA_WHEELS": "1", "MAX_JOBS": jobs}
        with (STATE / "build.log").open("w") as log:
            archive = next(STATE.glob("transformer_engine_torch-*.tar.gz"))
            command = [*build, str(archive)]
            subprocess.Popen(command, stdout=log, stderr=log, env=environment | extra, start_new_session=True)
    if part == 5 and (STATE / "build.log").exists():
        until = time.monotonic() + LIMIT / 2
        while not (built := list((STATE / "built").glob("*.whl"))) and time.monotonic() < until:
            time.sleep(5)
        if not built:
            print(
                (STATE / "build.log").read_text()[-3000:] + "\nTransformer Engine's extension is not built", flush=True
            )
        else:
            subprocess.run([*install, *map(str, built)], check=True)


def run(part: int, results: Path, limit: float) -> bool:
    """Run the checks of a part, each in a process of its own, and return whether all of them passed."""
    end = time.monotonic() + limit
    paths = [str(STATE / "site"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": ":".join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    try:
        unpack(part, environment)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"part {part}: what it brought is not installed: {error}", flush=True)
    device = gpu()
    words = {
        "small": f"--size={'600m' if device else '1m'}",
        "few": "" if device else "run.steps=2",
        "no_epochs": "" if device else "run.epochs=null",
        "no_warmup": "" if device else "optimizer.lr_warmup_steps=0",
        "state": str(STATE),
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    passed = True
    for name, arguments in CHECKS[part].items():
        begin = time.monotonic()
        command = [sys.executable, *filter(None, (argument.format(**words) for argument in arguments))]
        output, status = b"", "not run: no time was left"
        if begin < end:
            try:
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    timeout=end - begin,
                )
                output, status = done.stdout, f"FAILED: exit status {done.returncode}" if done.returncode else "passed"
            except subprocess.TimeoutExpired as error:
                output, status = error.stdout or b"", "FAILED: no time was left"
        text = output.decode(errors="replace")
        if status != "passed":
            print(text[-3000:])
            passed = False
        record = {
            "part": part,
            "check": name,
            "status": status,
            "seconds": round(time.monotonic() - begin, 1),
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "device": device,
            "versions": versions(environment),
            "table": [line for line in text.splitlines() if line.startswith("|")],
        }
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"part {part}, {name}: {status} ({record['seconds']} s)", flush=True)
    return passed


def versions(environment: dict[str, str]) -> str:
    sys.path[:0] = [path for path in environment["PYTHONPATH"].split(":") if path not in sys.path]
    found = []
    for name in ("torch", "transformers", "megatron-core", "transformer-engine-torch", "vllm"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


# ---- the tables


def report(results: Path, page: Path) -> None:
    """Write the newest result of each check that ran on a GPU between the marks of the page."""
    records = [json.loads(line) for line in results.read_text().splitlines()]
    newest = {(record["part"], record["check"]): record for record in records if record["device"]}
    if not newest:
        raise SystemExit(f"{results} has no line that was measured on a GPU: {page} stays as it is")
    lines = []
    for (part, check), record in sorted(newest.items()):
        lines += [f"### Part {part}: {check}", ""]
        lines += [f"{record['date']}, {record['device']}, {record['versions']}: {record['status']}.", ""]
        lines += [*record["table"], ""] if record["table"] else []
    text = page.read_text()
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="The first hour on a borrowed GPU; see first_hour.sh.")
    parser.add_argument("what", choices=("pack", "report", *map(str, CHECKS)))
    parser.add_argument("part", nargs="?", type=int, choices=CHECKS, help="of pack")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "first_hour.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu_results.md", help="of report")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a part")
    args = parser.parse_args()
    if (args.what == "pack") != (args.part is not None):
        parser.error("pack needs the number of a part, and nothing else takes one")
    if args.what == "pack":
        pack(args.part)
    elif args.what == "report":
        report(args.results, args.page)
    else:
        sys.exit(not run(int(args.what), args.results, args.limit))


if __name__ == "__main__":
    main()
