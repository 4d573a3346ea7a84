"""Writes the folder of the quickstart's model: configuration and tokenizer, no weights (`model.initialise: random`).

usage: make_model.py FOLDER
"""

import sys

import arithmetic

if __name__ == "__main__":
    arithmetic.write_model_folder(sys.argv[1])
