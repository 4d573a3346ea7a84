"""Whether this machine has an NVIDIA GPU, and whether the installed packages can use it. No torch is imported."""

import importlib.util
import os
import sys
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
    """torch's answer where torch is imported; else whether the driver's device files are here and not hidden."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return True
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1", "NoDevFiles"):
        return False
    return any(Path(DEVICES).glob("nvidia[0-9]*"))


def torch_is_cpu_build() -> bool:
    """By its version, such as 2.13.0+cpu."""
    try:
        return metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def check_torch_build() -> None:
    """Raises ConfigError where a CPU build of torch would leave this machine's GPU unused."""
    if torch_is_cpu_build() and has_cuda_device():
        raise ConfigError(
            f"torch {metadata.version('torch')} is a CPU build, and this machine has an NVIDIA GPU: {GPU_ENVIRONMENT} "
            "(CUDA_VISIBLE_DEVICES= computes on the CPU)"
        )


def has_transformer_engine() -> bool:
    """Transformer Engine with its extension for torch. Without that, importing it fails, and megatron-core with it."""
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    try:
        metadata.version("transformer-engine-torch")
    except metadata.PackageNotFoundError:  # NVIDIA's images have one distribution of both
        return any(_package_folder("transformer_engine").glob("**/transformer_engine_torch*.so"))
    return True


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    return Path(next(iter(spec.submodule_search_locations or [os.devnull])))
