"""Tests of the CUDA stack. They run in the environment of requirements-gpu.lock, on a GPU or on tools/cuda_without_gpu.

Elsewhere (in CI, too) they are skipped. On the pretended machine the kernels of Transformer Engine and vLLM do nothing:
these tests are of control flow, names and shapes, and look at no number that such a kernel would give."""

import importlib.util

import pytest


def pytest_collection_modifyitems(items):
    """Skips without importing torch where it is not needed."""
    here = [item for item in items if "gpu_stack" in item.path.parts]
    if not here:
        return
    import torch

    missing = [name for name in ("vllm", "transformer_engine") if importlib.util.find_spec(name) is None]
    reason = f"needs {', '.join(missing)}" if missing else None if torch.cuda.is_available() else "needs a CUDA device"
    for item in here:
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"{reason}: bash tools/gpu_stack.sh"))
