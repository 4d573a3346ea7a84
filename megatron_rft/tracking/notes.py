"""What a run said beside its numbers (alarms, resumes, lost engines): RUN/notes.jsonl, {"time": ..., "note": "..."}."""

import json
import time
from pathlib import Path

NOTES_FILE = "notes.jsonl"


def add_note(path: Path, note: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": round(time.time(), 3), "note": note}) + "\n")
