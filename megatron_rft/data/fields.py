"""Reads a raw row field by field. An error about a missing or unusable field names the file, the row and the field.

Published rows encode the same value in several ways: an object as JSON text or as an object, a list of one for one
value, a field under another name in another edition. The readers accept all of them, so that an adapter only gives
names.
"""

import json
import math
import re
from pathlib import Path, PurePosixPath
from typing import Any

from megatron_rft.utils.errors import DataError, did_you_mean

Row = dict[str, Any]
KINDS = {dict: "an object", bytes: "bytes"}
TEXTS = ("subject", "level", "id")  # of an adapted row
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # JSON's escape of half a character


def not_finite(value: Any) -> str:
    """ "NaN", "Infinity" or "-Infinity" if the value is that number, else ""."""
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else ""


def check_scalar(value: Any) -> None:
    """Refuses a value that is neither text nor a number.

    Raises:
        ValueError: it is null, NaN, infinite, a list or an object. The message says which, and continues the name of
            the field.
    """
    if value is None:
        raise ValueError("is null, not text or a number")
    if not_finite(value):
        raise ValueError(f"is {not_finite(value)}, not text or a finite number")
    if isinstance(value, dict | list | tuple | bytes):
        raise ValueError(f"is {KINDS.get(type(value), 'a list')}, not text or a number: {str(value)[:60]}")


def check_escapes(json_text: str, value: Any, place: object) -> None:
    """Refuses lone surrogates (half of a character, as \\ud83d alone) that JSON's escapes have put into `value`, which
    was read from `json_text`: no tokenizer and no file takes them. No other reader gives any."""
    if SURROGATE.search(json_text):
        text = json.dumps(value, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = ascii(text[error.start])[1:-1]
            raise DataError(f"{place}: its text has half of a character, {half} (lone surrogate): remove it") from None


class Streamed(PurePosixPath):
    """A file that is read over the network: hf://datasets/organisation/name@revision/path."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)


File = Path | Streamed


class Fields:
    """`place` names adapter, file and row for messages; `file` is the row's file, whose name may carry information.
    Several names in a call are one field's names in several editions."""

    def __init__(self, row: Row, place: object, file: File, inside: str = ""):
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
        if not_finite(value):
            self._checked(int, "a number", value, names)  # which it is not
        return value

    def text(self, *names: str) -> str:
        return self._checked(str, "text", self.get(*names), names)

    def items(self, *names: str) -> list:
        """A list, or JSON text of one."""
        return self._checked(list, "a list", self.json(*names), names)

    def texts(self, *names: str) -> list[str]:
        """A list of texts and numbers, as text."""
        values = self.items(*names)
        for value in values:
            try:
                check_scalar(value)
            except ValueError as error:
                raise self.wrong(f"a value of {self.inside}{self._name(names)} {error}") from None
        return list(map(str, values))

    def object(self, *names: str) -> "Fields":
        """The fields of an object, or of JSON text of one."""
        value = self._checked(dict, "an object", self.json(*names), names)
        return Fields(value, self.place, self.file, f"{self.inside}{self._name(names)}.")

    def json(self, *names: str) -> Any:
        """The value of JSON text; a value that is not text is returned as it is."""
        value = self.get(*names)
        if not isinstance(value, str):
            return value
        try:
            decoded = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise self.wrong(f"{self.inside}{self._name(names)} is not JSON ({error}): {value[:60]!r}") from None
        check_escapes(value, decoded, self.place)
        return decoded

    def wrong(self, problem: str) -> DataError:
        return DataError(f"{self.place}: {problem}")

    def _name(self, names: tuple[str, ...]) -> str:
        return next(name for name in names if self.has(name))

    def _checked(self, kind: type, wanted: str, value: Any, names: tuple[str, ...]) -> Any:
        if isinstance(value, kind):
            return value
        found = f"{type(value).__name__}: {str(value)[:60]}"
        raise self.wrong(f"{self.inside}{self._name(names)} is not {wanted} but {found}")


# ---- rows with our field names (adapters/__init__.py), and conversations


def as_row(question: str, answer: str, **more: Any) -> Row:
    """A row without fields that are None or empty; subject, level and id are text."""
    kept = {name: value for name, value in more.items() if value not in (None, "", [], {})}
    texts = {name: str(value) for name, value in kept.items() if name in TEXTS}
    return {"question": question.strip(), "answer": answer, **kept, **texts}


def unusable(reason: str) -> Row:
    """A row to leave out; the number of such rows is reported by reason."""
    return {"unusable": reason}


def conversation(messages: list[Any], fields: Fields) -> tuple[list[dict[str, str]], str]:
    """[{role, content}] -> the turns before the last, with their calls, and the last user turn's text.

    Raises:
        DataError: a message has no role and content, one is not text (only an assistant's turn of tool calls may have
            none), or the last turn is not the user's.
    """
    turns = []
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or not message.keys() & {"content", "tool_calls"}:
            raise fields.wrong(f"a message has a role and a content, not {str(message)[:60]}")
        role, content = message["role"], message.get("content")
        if content is None and role == "assistant" and message.get("tool_calls"):
            content = ""
        for name, value in (("role", role), ("content", content)):
            if not isinstance(value, str):
                raise fields.wrong(f"the {name} of a message is text, not {json.dumps(value, default=str)[:60]}")
        turns.append({"role": role, "content": content} | besides_text(message))
    if not turns or turns[-1]["role"] != "user":
        raise fields.wrong("its messages do not end with the user's turn")
    return turns[:-1], turns[-1]["content"]


def besides_text(message: dict[str, Any]) -> dict[str, Any]:
    """What a chat template takes of a message besides its role and content. The arguments of calls become objects."""
    kept = {key: message[key] for key in ("tool_call_id", "name", "reasoning_content") if message.get(key)}
    calls = [(call.get("id"), call["function"]) for call in message.get("tool_calls") or ()]
    if calls:  # clients add fields of their own, such as `parsed_arguments` and `index`
        called = [(id, {"name": of["name"], "arguments": _arguments(of.get("arguments"))}) for id, of in calls]
        kept["tool_calls"] = [{"type": "function", "id": id, "function": function} for id, function in called]
    return kept


def _arguments(given: Any) -> Any:
    try:
        return json.loads(given or "{}") if isinstance(given, str | None) else given
    except ValueError:
        return given


def system(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text.strip()}] if text.strip() else []
