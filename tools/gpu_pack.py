"""Packs all that a call of gpu_kit.py needs, to be carried to a machine with a GPU and without a network:

    python tools/gpu_pack.py 1 [2] [3]     fills build/gpu_kit/1 with the package, the kit and site.tar.xz

The archive has the packages that such a machine lacks, for Python 3.12 on Linux. Of a library's code for many chips it
has that of sm_90 alone, and it leaves out what a dense model in bf16 or FP8 on Hopper never loads.
"""

import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / "build" / "gpu_kit"
LARGEST = {1: 15, 2: 60, 3: 60}  # MiB to carry
TE = "2.20.2"
BASE = "megatron-core==0.16.1 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types typing-inspection psutil "
# of call 3: what an engine imports at its start, beside what images with torch and transformers have (aiohttp, httpx,
# numba, opencv, protobuf, sentencepiece, tiktoken and the like)
PACKAGES = {
    1: BASE + "pillow cloudpickle",
    2: BASE + f"transformer-engine=={TE} transformer-engine-cu13=={TE} einops nvdlfw-inspect onnx onnx-ir onnxscript "
    "ml-dtypes protobuf importlib-metadata lazy-importer zipp",
    3: BASE + "cloudpickle vllm==0.32.0 apache-tvm-ffi==0.1.11 cachetools==8.0.1 cbor2==6.2.1 "
    "compressed-tensors==0.17.0 fastapi==0.136.3 httpx2==2.16.2 llguidance==1.7.6 loguru==0.7.3 msgspec==0.22.0 "
    "openai==3.54.0 oss-harmony==0.0.11 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pyzmq==27.1.0 "
    "sniffio==1.3.1 starlette==1.10.0 xgrammar==0.2.8",
}
UNUSED = {"nvidia-cudnn-frontend"}  # 11 MiB, of fused operators that megatron-core does not ask for
LEFT_OUT = re.compile(
    r"""bin/ | vllm/(
        vllm-rs | benchmarks/ | model_executor/layers/fused_moe/configs/
        | third_party/(deep_gemm|fmha_sm100)/ | _qutlass_C   # need symbols of torch 2.13, or are for Blackwell
        | vllm_flash_attn/_vllm_fa2_C                        # Hopper takes FlashAttention 3
        | _deepselect_C | _flashkda_C | _flashmla
    ) | (?!vllm|transformer_engine).*\.(h|hpp|a|pyx|cc|cu)$""",
    re.VERBOSE,
)
WINDOW = 192 << 20  # bytes: libraries for one chip repeat themselves far apart
# of the environment in which Transformer Engine's extension for torch is compiled, once
COMPILER = "torch==2.11.0 setuptools==80.10.2 wheel pybind11 ninja numpy packaging pydantic nvidia-cuda-nvcc==13.0.* "
COMPILER += "nvidia-cuda-crt==13.0.* nvidia-cuda-cccl==13.0.* nvidia-nvvm==13.0.*"


def pack(number: int, folder: Path, packages: bool = True) -> int:
    """Fill the folder of a call. Returns its bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("megatron_rft", "examples/quickstart", "tools/bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.glob("tools/gpu_*"):
        shutil.copy(file, folder / "tools")
    if packages:
        with tempfile.TemporaryDirectory() as site:
            install(number, Path(site))
            archive(Path(site), folder / "site.tar.xz")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB")
    if size > LARGEST[number] << 20:
        raise SystemExit(f"{folder} has more than {LARGEST[number]} MiB")
    return size


def install(number: int, site: Path) -> None:
    systems = [f"manylinux_2_{n}_x86_64" for n in range(5, 40)] + ["manylinux2014_x86_64", "linux_x86_64"]
    kind = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    kind += ["--abi=cp312", "--abi=abi3", "--abi=none", *(f"--platform={system}" for system in systems)]
    own = [str(compiled())] if number == 2 else []
    pip(sys.executable, "install", "--no-compile", "--target", str(site), *kind, *PACKAGES[number].split(), *own)
    if number < 3 and (lacking := needed(site)):  # vLLM declares much that it does not import here
        raise SystemExit(f"the packages of call {number} need {', '.join(sorted(lacking))} too: add them to PACKAGES")


def pip(python: str | Path, *arguments: str, **options) -> None:
    subprocess.run([str(python), "-m", "pip", "-q", *arguments], check=True, **options)


def compiled() -> Path:
    """Return Transformer Engine's extension for torch, which has no published wheel; compiles it once, for half an hour
    and more, in an environment of python3.12."""
    folder = PACKED / "compiled"
    if not any(folder.glob("*.whl")):
        subprocess.run(["python3.12", "-m", "venv", str(folder / "venv")], check=True)
        python, site = folder / "venv/bin/python", folder / "venv/lib/python3.12/site-packages"
        pip(python, "install", *COMPILER.split())
        given = {"CUDA_HOME": str(site / "nvidia" / "cu13"), "NVTE_BUILD_USE_NVIDIA_WHEELS": "1"}
        given["PATH"] = f"{python.parent}:{os.environ['PATH']}"
        source = ("--no-deps", "--no-build-isolation", "-w", str(folder), f"transformer-engine-torch=={TE}")
        pip(python, "wheel", *source, env=os.environ | given)
    return next(folder.glob("*.whl"))


def needed(site: Path) -> set[str]:
    """Return what the packages of a folder require that they are not, and that torch and transformers do not bring."""
    there, packed = ("torch", "transformers"), [*metadata.distributions(path=[str(site)])]
    brought = required(line for name in there for line in metadata.requires(name) or ())
    asked = required(line for package in packed for line in package.requires or ())
    return asked - brought - UNUSED - {canonicalize_name(name) for name in (*there, *(p.name for p in packed))}


def required(lines: Iterable[str]) -> set[str]:
    place = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.3"}
    asked = map(Requirement, lines)
    return {canonicalize_name(r.name) for r in asked if r.marker is None or r.marker.evaluate(place)}


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


if __name__ == "__main__":
    for each in map(int, sys.argv[1:]):
        pack(each, PACKED / str(each))
