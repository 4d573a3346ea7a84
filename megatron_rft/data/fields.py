"""A raw row, read field by field. What is missing or of another kind is said with the file, the row and the field.

Published rows write one thing in several ways: an object as JSON text or as an object, a list of one for one value, a
field under another name in another edition. The readers here take all of them, so that an adapter says only names.
"""

import json
from pathlib import Path
from typing import Any

from megatron_rft.utils.errors import DataError, did_you_mean

Row = dict[str, Any]


class Fields:
    """`place` names adapter, file and row; `file` is where the row was read, for what only its name says.
    Several names in a call are one field's names in several editions."""

    def __init__(self, row: Row, place: str, file: Path, inside: str = ""):
        self.row, self.place, self.file, self.inside = row, place, file, inside

    def has(self, name: str) -> bool:
        return self.row.get(name) is not None

    def maybe(self, *names: str) -> Any:
        """The first of the names that the row has, else None."""
        return next((self.row[name] for name in names if self.has(name)), None)

    def get(self, *names: str) -> Any:
        value = self.maybe(*names)
        if value is None:
            raise self.wrong(
                f"no field {' or '.join(repr(self.inside + name) for name in names)}; "
                f"it has {', '.join(map(repr, self.row)) or 'none'}.{did_you_mean(names[0], self.row)}"
            )
        return value

    def text(self, *names: str) -> str:
        value = self.get(*names)
        if not isinstance(value, str):
            raise self._kind(names, "text", value)
        return value

    def items(self, *names: str) -> list:
        """A list, or JSON text of one."""
        value = self._json(names)
        if not isinstance(value, list):
            raise self._kind(names, "a list", value)
        return value

    def object(self, *names: str) -> "Fields":
        """The fields of an object, or of JSON text of one."""
        value = self._json(names)
        if not isinstance(value, dict):
            raise self._kind(names, "an object", value)
        return Fields(value, self.place, self.file, f"{self.inside}{self._name(names)}.")

    def json(self, *names: str) -> Any:
        """The value that JSON text stands for; what is no text is that value already."""
        return self._json(names)

    def wrong(self, problem: str) -> DataError:
        return DataError(f"{self.place}: {problem}")

    def _name(self, names: tuple[str, ...]) -> str:
        return next(name for name in names if self.has(name))

    def _json(self, names: tuple[str, ...]) -> Any:
        value = self.get(*names)
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except ValueError as error:
            raise self.wrong(f"{self.inside}{self._name(names)} is not JSON ({error}): {value[:60]!r}") from None

    def _kind(self, names: tuple[str, ...], wanted: str, value: Any) -> DataError:
        return self.wrong(
            f"{self.inside}{self._name(names)} is not {wanted} but {type(value).__name__}: {str(value)[:60]}"
        )
