"""Sums and differences of two numbers of two digits, as FOLDER/train.jsonl, validation.jsonl and test.jsonl.

usage: make_problems.py FOLDER

A problem is in one file only. Differences are never negative.
"""

import json
import random
import sys
from pathlib import Path

SIZES = {"test": 200, "validation": 100, "train": 4000}


def problems() -> list[dict[str, str]]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    sums = [{"question": f"{a} + {b}", "answer": str(a + b), "subject": "sum"} for a, b in pairs]
    return sums + [
        {"question": f"{a} - {b}", "answer": str(a - b), "subject": "difference"} for a, b in pairs if a >= b
    ]


def main(folder: Path) -> None:
    rows = problems()
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        chosen, rows = rows[:size], rows[size:]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
