"""Scores for test_programs.py: (row, folder, status, conversation) -> the score."""

import json
import time

from megatron_rft.environments import Score


def files(row, folder, status, conversation) -> Score:
    """What the program left in its folder."""
    found = {path.name: path.read_text() for path in sorted(folder.iterdir())}
    about = {"files": found, "status": status, "index": row["index"], "last": conversation[-1]}
    return Score(0.5, json.dumps(about))


def grows(row, folder, status, conversation) -> float:
    """Whether a file grows while the folder is graded."""
    before = (folder / "late.txt").stat().st_size
    time.sleep(0.3)
    return float(before > 0 and (folder / "late.txt").stat().st_size == before)


def slow(row, folder, status, conversation) -> float:
    time.sleep(60)
    return 1.0


def three(row, folder, status) -> float:
    return 0.0
