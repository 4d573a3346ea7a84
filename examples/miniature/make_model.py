"""Writes the folder of the miniature's model, 0.2 M parameters: configuration and tokenizer, no weights.

usage: make_model.py FOLDER
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.quickstart import arithmetic  # noqa: E402

if __name__ == "__main__":
    arithmetic.write_model_folder(sys.argv[1], hidden_size=64, intermediate_size=192, num_hidden_layers=3)
