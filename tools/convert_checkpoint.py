"""Convert a checkpoint: Hugging Face to Megatron, or Megatron to Hugging Face.

    python tools/convert_checkpoint.py Qwen/Qwen3-8B-Base checkpoints/qwen3_8b
    python tools/convert_checkpoint.py runs/pipo exported

The same as `megatron-rft convert`; docs/checkpoints.md says more.
"""

import sys

from megatron_rft.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
