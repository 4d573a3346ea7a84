"""What a run said beside its numbers (alarms, resumes, lost engines): RUN/notes.jsonl, {"time": ..., "note": "..."}."""

import json
import time
from pathlib import Path

NOTES_FILE = "notes.jsonl"


def add_note(path: Path, note: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": round(time.time(), 3), "note": note}) + "\n")


def read_notes(path: Path) -> list[dict]:
    """Every whole line, oldest first; empty where there is no file."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # a kill left it incomplete
            continue
    return found
