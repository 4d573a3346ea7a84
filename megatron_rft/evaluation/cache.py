"""Stores completions while an evaluation runs, so that a killed evaluation continues where it stopped.

The first line of `NAME.part.jsonl` has everything that the completions depend on (weights, problems, sampling,
verifier). If any of it has changed, the stored completions are discarded. A problem counts when it is complete.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rft.utils.files import read_json_lines, write_atomically

Row = dict[str, Any]  # a graded completion, with its `problem`


@dataclass
class EvaluationCache:
    """Completions of an earlier start are reused if its `depends_on` (JSON) was the same. `note` is called with the
    number of answered problems whenever it grows."""

    path: Path
    depends_on: dict[str, Any]
    samples: int
    note: Callable[[int], None] = lambda _: None
    completions: dict[int, list[Row]] = field(default_factory=dict)  # by problem

    def __post_init__(self):
        self.depends_on = json.loads(json.dumps(self.depends_on))  # tuples become lists, as in the file
        self.completions = self._read()
        # Rewritten, without an incomplete last line and without completions of another evaluation.
        lines = [{"depends_on": self.depends_on}, *(each for many in self.completions.values() for each in many)]
        write_atomically(self.path, "".join(map(_line, lines)))

    def add(self, completions: list[Row]) -> None:
        """Store all completions of some problems. They are on disk when this returns."""
        for each in completions:
            self.completions.setdefault(each["problem"], []).append(each)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(map(_line, completions)))
        self.note(len(self.completions))

    def _read(self) -> dict[int, list[Row]]:
        found: dict[int, list[Row]] = {}
        for number, row in enumerate(read_json_lines(self.path)):
            if number == 0:
                if row != {"depends_on": self.depends_on}:
                    return {}
                continue
            found.setdefault(row["problem"], []).append(row)
        return {problem: many for problem, many in found.items() if len(many) == self.samples}


def _line(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
