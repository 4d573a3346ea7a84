"""vLLM for one kind of chip, small enough to be carried to a machine with a GPU: `gpu_kit.py pack 3` uses it.

Of vLLM's published wheel (CUDA 13) and of what it imports beside the packages of such a machine, this leaves out what a
dense model in bf16 or FP8 on Hopper never loads, writes zeros in place of other chips' code, and compresses the rest.
"""

import io
import lzma
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VLLM = "0.32.0"
# what an engine imports at its start, beside torch and transformers, what these need, and what images with both have
# (aiohttp, httpx, numba, opencv, protobuf, sentencepiece, tiktoken and the like)
NEEDED = ("apache-tvm-ffi==0.1.11", "cachetools==8.0.1", "cbor2==6.2.1", "compressed-tensors==0.17.0")
NEEDED += ("fastapi==0.136.3", "httpx2==2.16.2", "llguidance==1.7.6", "loguru==0.7.3", "msgspec==0.22.0")
NEEDED += ("openai==3.54.0", "oss-harmony==0.0.11", "partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1")
NEEDED += ("pyzmq==27.1.0", "sniffio==1.3.1", "starlette==1.10.0", "xgrammar==0.2.8")
LEFT_OUT = (
    "vllm/vllm-rs",  # the Rust front end
    "vllm/benchmarks/",
    "vllm/third_party/deep_gemm/",  # needs symbols of torch 2.13; CUTLASS multiplies FP8 without it
    "vllm/third_party/fmha_sm100/",
    "vllm/vllm_flash_attn/_vllm_fa2_C",  # Hopper takes FlashAttention 3
    "vllm/_qutlass_C",  # needs symbols of torch 2.13; for Blackwell alone
    "vllm/_deepselect_C",
    "vllm/_flashkda_C",
    "vllm/_flashmla",
    "vllm/model_executor/layers/fused_moe/configs/",
)
SOURCES = (".h", ".hpp", ".a", ".pyx", ".cc", ".cu")
WINDOW = 192 << 20  # bytes: libraries for one chip repeat themselves far apart


def pack(wheels: Path, folder: Path, cut) -> None:
    """Write the archives into `folder` from the wheels of VLLM and NEEDED. `cut`: bytes of a library -> bytes."""
    files = contents(wheels, cut)
    flash = {name for name in files if "_vllm_fa3_C" in name}
    kernels = {name for name in files if name.startswith("vllm/") and ".so" in name} - flash
    python = {name for name in files if name.startswith("vllm")} - flash - kernels
    parts = {"flash_attention_3": flash, "vllm_kernels": kernels, "vllm_python": python}
    parts["needed"] = files.keys() - flash - kernels - python
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda part: archive(folder / f"{part}.tar.xz", {n: files[n] for n in parts[part]}), parts))


def contents(wheels: Path, cut) -> dict[str, bytes]:
    """Return every file that is carried, by its path."""
    files = {}
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as opened:
            for name in filter(carried, opened.namelist()):
                data = opened.read(name)
                files[name] = cut(data) if ".so" in name and name.startswith("vllm/") else data
    return files


def carried(name: str) -> bool:
    first, *rest = name.split("/")
    if name.endswith("/") or name.startswith(LEFT_OUT) or first.endswith(".data"):
        return False
    if first.endswith(".dist-info"):
        return rest[0] in ("METADATA", "entry_points.txt")
    return first.startswith("vllm") or not name.endswith(SOURCES)


def archive(target: Path, files: dict[str, bytes]) -> None:
    """Files of one kind lie beside each other, in a window that spans many."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in sorted(files, key=lambda name: (Path(name).suffix, name)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(files[name]), 0o755 if ".so" in name else 0o644
            tar.addfile(entry, io.BytesIO(files[name]))
    how = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": WINDOW}]
    target.write_bytes(lzma.compress(buffer.getvalue(), filters=how))


def unpack(archives: list[Path], folder: Path) -> None:
    def each(path: Path) -> None:
        with tarfile.open(path) as tar:
            tar.extractall(folder, filter="data")

    with ThreadPoolExecutor() as pool:
        list(pool.map(each, archives))
