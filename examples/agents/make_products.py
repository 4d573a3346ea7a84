"""Writes products of two numbers of two digits, each after two worked ones that call the function `multiply`, as
FOLDER/train.jsonl and test.jsonl. FOLDER is the argument."""

import json
import random
import sys
from pathlib import Path
from typing import Any

SIZES = {"test": 100, "train": 2000}
SHOWN = [(23, 57), (48, 16)]


def worked(a: int, b: int) -> list[dict[str, str]]:
    """A conversation with a call, its result and the answer."""
    call = json.dumps({"name": "multiply", "arguments": {"a": a, "b": b}})
    return [
        {"role": "user", "content": f"{a} * {b}"},
        {"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


def row(before: list[dict[str, str]], a: int, b: int) -> dict[str, Any]:
    asked = worked(a, b)[0]
    return {"question": [*before, asked], "product": asked["content"], "answer": str(a * b)}


def main(folder: Path) -> None:
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100) if (a, b) not in SHOWN]
    random.Random(0).shuffle(pairs)
    before = [message for pair in SHOWN for message in worked(*pair)]
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        chosen, pairs = pairs[:size], pairs[size:]
        rows = [row(before, a, b) for a, b in chosen]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
