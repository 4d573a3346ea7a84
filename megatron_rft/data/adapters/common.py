"""Shared by adapters: writing a row with our field names (see `adapters/__init__.py`), and conversations."""

import json
from typing import Any

from megatron_rft.data.fields import Fields, Row

TEXTS = ("subject", "level", "id")


def as_row(question: str, answer: str, **more: Any) -> Row:
    """A row without fields that are None or empty; subject, level and id are text."""
    kept = {name: value for name, value in more.items() if value not in (None, "", [], {})}
    texts = {name: str(value) for name, value in kept.items() if name in TEXTS}
    return {"question": question.strip(), "answer": answer, **kept, **texts}


def unusable(reason: str) -> Row:
    """A row to leave out; the number of such rows is reported by reason."""
    return {"unusable": reason}


def conversation(messages: list[Any], fields: Fields) -> tuple[list[dict[str, str]], str]:
    """[{role, content}] -> the turns before the last, and the last user turn's text.

    Raises:
        DataError: a message has no role and content, one is not text (only an assistant's turn of tool calls may have
            null content), or the last turn is not the user's.
    """
    turns = []
    for message in messages:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            raise fields.wrong(f"a message has a role and a content, not {str(message)[:60]}")
        role, content = message["role"], message["content"]
        if content is None and role == "assistant" and message.get("tool_calls"):
            content = ""
        for name, value in (("role", role), ("content", content)):
            if not isinstance(value, str):
                raise fields.wrong(f"the {name} of a message is text, not {json.dumps(value, default=str)[:60]}")
        turns.append({"role": role, "content": content})
    if not turns or turns[-1]["role"] != "user":
        raise fields.wrong("its messages do not end with the user's turn")
    return turns[:-1], turns[-1]["content"]


def system(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text.strip()}] if text.strip() else []
