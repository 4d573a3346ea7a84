"""vLLM's API server for a model that reads images.

    python -m megatron_rft.inference.vllm.seeing_server --model FOLDER ...

Each of the server's processes imports this file, and so replaces the model's processor.
"""

import runpy
import sys
from pathlib import Path

from megatron_rft.conversion.folder import load_config
from megatron_rft.inference.vllm.images import replace_processor

replace_processor(load_config(Path(sys.argv[sys.argv.index("--model") + 1])))

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
