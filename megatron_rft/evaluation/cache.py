"""Stores completions while an evaluation runs: a killed evaluation continues where it stopped, a finished one is not
repeated.

NAME.jsonl has the completions, `conditions.json` everything that they depend on (weights, problems, sampling,
verifier), by name. If any of it has changed, the stored completions are discarded. A problem counts when it is complete
and its grader has not failed.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rft.utils.files import read_json, read_json_lines, write_atomically

CONDITIONS = "conditions.json"
Row = dict[str, Any]  # a graded completion, with its `problem`


@dataclass
class EvaluationCache:
    """Completions of an earlier start are reused if its `depends_on` (JSON) was the same. `note` is called with the
    number of answered problems whenever it grows."""

    folder: Path
    name: str
    depends_on: dict[str, Any]
    samples: int
    note: Callable[[int], None] = lambda _: None
    completions: dict[int, list[Row]] = field(default_factory=dict)  # by problem

    def __post_init__(self):
        self.depends_on = json.loads(json.dumps(self.depends_on))  # tuples become lists, as in the file
        known = conditions(self.folder)
        self.completions = self._read() if known.get(self.name) == self.depends_on else {}
        # Rewritten, without an incomplete last line and without completions of another evaluation.
        kept = (each for many in self.completions.values() for each in many)
        write_atomically(completions_file(self.folder, self.name), lines(kept))
        write_atomically(self.folder / CONDITIONS, json.dumps(known | {self.name: self.depends_on}, indent=1))

    def add(self, completions: list[Row]) -> None:
        """Store all completions of some problems. They are on disk when this returns."""
        for each in completions:
            self.completions.setdefault(each["problem"], []).append(each)
        with completions_file(self.folder, self.name).open("a", encoding="utf-8") as file:
            file.write(lines(completions))
        self.note(len(self.completions))

    def _read(self) -> dict[int, list[Row]]:
        by_problem: dict[int, list[Row]] = {}
        for row in read_json_lines(completions_file(self.folder, self.name)):
            by_problem.setdefault(row["problem"], []).append(row)
        return {
            problem: many
            for problem, many in by_problem.items()
            if len(many) == self.samples and not any(row.get("error") for row in many)
        }


def conditions(folder: Path) -> dict[str, Any]:
    """What the completions in `folder` depend on, by the name of their evaluation."""
    return read_json(folder / CONDITIONS) or {}


def completions_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.jsonl"


def lines(rows: Iterable[Row]) -> str:
    """As JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
