"""Finds out whether this machine has an NVIDIA GPU and whether the installed packages can use it. Imports no torch."""

import ctypes
import importlib.util
import os
import sys
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

from megatron_rft.utils.errors import ConfigError

GPU_ENVIRONMENT = "`. tools/setup_env.sh gpu` makes an environment with the CUDA builds"
TRANSFORMER_ENGINE = "2.20.2"
TRANSFORMER_ENGINE_INSTALL = (
    f"`. tools/setup_env.sh gpu`, or: pip install transformer-engine=={TRANSFORMER_ENGINE} "
    f"transformer-engine-cu13=={TRANSFORMER_ENGINE}, then pip install --no-build-isolation "
    f"transformer-engine-torch=={TRANSFORMER_ENGINE}"
)
DEVICES = "/dev"


def has_cuda_device() -> bool:
    """Return whether there is a visible GPU: ask torch if it is imported, else look for the driver's device files."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return True
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1", "NoDevFiles"):
        return False
    return any(Path(DEVICES).glob("nvidia[0-9]*"))


def gpu_gib() -> float | None:
    """Return the memory of this machine's largest GPU, by its driver; None if there is none, or none that says it."""
    if not has_cuda_device():
        return None
    most, count, gpu, memory = 0, ctypes.c_uint(), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
    with suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        nvml.nvmlInit_v2(), nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        for index in range(count.value):
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(gpu))
            failed = nvml.nvmlDeviceGetMemoryInfo(gpu, memory)  # total, free and used bytes
            most = max(most, 0 if failed else memory[0])
    return most / (1 << 30) or None


def torch_is_cpu_build() -> bool:
    """Return whether the installed torch is a CPU build, by its version, such as 2.13.0+cpu."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def check_torch_build() -> None:
    """Raise ConfigError if this machine has a GPU that the installed CPU build of torch would not use."""
    if torch_is_cpu_build() and has_cuda_device():
        raise ConfigError(
            f"torch {metadata.version('torch')} is a CPU build, and this machine has an NVIDIA GPU: {GPU_ENVIRONMENT} "
            "(CUDA_VISIBLE_DEVICES= computes on the CPU)"
        )


def has_transformer_engine() -> bool:
    """Return whether Transformer Engine is installed with its extension for torch. Without the extension, importing it
    and megatron-core fails."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None:
        return False
    try:
        metadata.version("transformer-engine-torch")
    except metadata.PackageNotFoundError:  # NVIDIA's images have both in one distribution
        folders = map(Path, spec.submodule_search_locations or ())
        return any(file for folder in folders for file in folder.glob("**/transformer_engine_torch*.so"))
    return True


def has_fused_attention(capability: tuple[int, int]) -> bool:
    """Whether Transformer Engine has a fused kernel for packed sequences on a GPU of this compute capability: cuDNN's
    from 9.0 on, or that of the package flash-attn. Its remaining kernel stores every score."""
    return capability >= (9, 0) or importlib.util.find_spec("flash_attn") is not None


CPU_FLAGS = "/proc/cpuinfo"


def cpu_words() -> set[str]:
    """Return what Linux says about this CPU, its maker and its instructions among it; nothing elsewhere."""
    with suppress(OSError):
        return set(Path(CPU_FLAGS).read_text().split())
    return set()


def multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for products of bf16 matrices; True where Linux does not say."""
    words = cpu_words()
    return not words or not words.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def machine_bytes() -> int:
    """What processes may take here: all memory, or a container's limit."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in LIMITS:
        with suppress(OSError, ValueError):  # absent, or "max"
            limits.append(int(Path(limit).read_text()))
    return min(limits)


def keep_large_blocks() -> None:
    """Let glibc reuse freed blocks of up to a GiB, such as a layer's activations; elsewhere this does nothing.

    Else it gets each one of more than 32 MiB from the system anew, which clears all of its pages. Only
    `return_free_pages` gives back what is free.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    for option, value in ((-1, -1), (-3, 1 << 30)):  # M_TRIM_THRESHOLD (never), M_MMAP_THRESHOLD
        mallopt(option, value)


# Gives what the allocator keeps free back to the system, with glibc; elsewhere it does nothing. Batches of all lengths
# leave gaps of a megabyte between blocks, which glibc would keep for itself.
return_free_pages = partial(getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None), 0)
