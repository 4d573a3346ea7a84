"""Packs all that a call of gpu_kit.py needs, to be carried to a machine with a GPU and without a network:

    python3.12 tools/gpu_pack.py 1 [2] [3]     fills build/gpu_kit/1 with the package, the kit and site.tar.xz

The archive has the packages that such a machine lacks, for the Python that packs. Of a library's code for many chips it
has that of sm_90 alone, and it leaves out what a dense model in bf16 or FP8 on Hopper never loads. Call 2 needs the
wheel of Transformer Engine's extension for torch in build/gpu_kit/compiled: docs/gpu_results.md compiles it.
"""

import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKED = ROOT / "build" / "gpu_kit"
LARGEST = {1: 15, 2: 60, 3: 60}  # MiB to carry
BASE = "megatron-core==0.16.1 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 typing-inspection==0.4.5 "
BASE += "psutil==7.2.2 cloudpickle==3.1.3 "
# All that these import beside what an image with torch and transformers has (for vLLM also aiohttp, httpx, numba,
# opencv, protobuf, sentencepiece, tiktoken and the like): pip adds nothing.
PACKAGES = {
    1: BASE + "pillow==13.0.0",
    2: BASE
    + "transformer-engine==2.20.2 transformer-engine-cu13==2.20.2 transformer-engine-torch==2.20.2 einops==0.8.2 "
    "nvdlfw-inspect==0.2.2 onnx==1.23.2 onnx-ir==1.1.0 onnxscript==0.7.2 ml-dtypes==0.6.0 protobuf==7.36.2 "
    "importlib-metadata==10.2.0 lazy-importer==0.1.0 zipp==4.1.2",
    3: BASE + "vllm==0.32.0 apache-tvm-ffi==0.1.11 cachetools==8.0.1 cbor2==6.2.1 compressed-tensors==0.17.0 "
    "fastapi==0.136.3 httpx2==2.16.2 llguidance==1.7.6 loguru==0.7.3 msgspec==0.22.0 openai==3.54.0 "
    "oss-harmony==0.0.11 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pyzmq==27.1.0 sniffio==1.3.1 "
    "starlette==1.10.0 xgrammar==0.2.8",
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
            install(number, site)
            archive(Path(site), folder / "site.tar.xz")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB")
    if size > LARGEST[number] << 20:
        raise SystemExit(f"{folder} has more than {LARGEST[number]} MiB")
    return size


def install(number: int, site: str) -> None:
    if sys.version_info[:2] != (3, 12):
        raise SystemExit(
            f"this is Python {sys.version.split()[0]}, and the other machine has 3.12: python3.12 {__file__}"
        )
    kind = ["--no-deps", "--no-compile", "--only-binary=:all:", "--find-links", str(PACKED / "compiled")]
    command = [sys.executable, "-m", "pip", "-q", "install", "--target", site, *kind, *PACKAGES[number].split()]
    subprocess.run(command, check=True)


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
