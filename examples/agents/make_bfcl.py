"""Writes BFCL's tasks of several turns, which bfcl-eval has (. tools/setup_env.sh cpu,bfcl), with their answers as
FOLDER/train.json and test.json. FOLDER is the argument. Each fifth task is one to test, in the category base alone; the
variants of a task have its number, so that none of these is trained on."""

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

CATEGORIES = ("base", "miss_param")  # long_context has results of thousands of tokens


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def main(folder: Path) -> None:
    data = Path(find_spec("bfcl_eval").submodule_search_locations[0]) / "data"
    shutil.copytree(data / "multi_turn_func_doc", folder / "multi_turn_func_doc", dirs_exist_ok=True)
    parts: dict[str, list[str]] = {"train": [], "test": []}
    for category in CATEGORIES:
        name = f"BFCL_v4_multi_turn_{category}.json"
        answers = {row["id"]: row["ground_truth"] for row in rows(data / "possible_answer" / name)}
        for row in rows(data / name):
            part = "train" if int(row["id"].rpartition("_")[2]) % 5 else "test"
            if part == "train" or category == "base":
                parts[part].append(json.dumps(row | {"ground_truth": answers[row["id"]]}) + "\n")
    for part, lines in parts.items():
        (folder / f"{part}.json").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
