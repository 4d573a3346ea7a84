"""Tool calls in a text, in the forms that models write. Text and JSON only: nothing of a response is ever evaluated.

<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>     one or several, one or several calls in each
[{"name": "f", "parameters": {"a": 1}}, {"f": {"a": 1}}]        JSON, with or without a code fence
[f(a=1), g.h(b="x")]                                            Python calls with keyword arguments
"""

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
FENCE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
ARGUMENTS = ("arguments", "parameters", "args")
LONGEST = 20_000  # characters that are read as calls


class Malformed(ValueError):
    """There is an attempt at a call that cannot be read."""


class BrokenReference(ValueError):
    """A row's own calls cannot be read."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


def equal(a: Any, b: Any) -> bool:
    """Of values from JSON: 1 is 1.0, and is not true."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def tool_calls(text: str) -> list[Call]:
    """The calls of a response, none where it makes none. Raises Malformed."""
    text = text.rpartition("</think>")[2]
    tagged = TAGGED.findall(text)
    if tagged:
        return [call for part in tagged for call in _several(part)]
    if "<tool_call>" in text:
        raise Malformed("a <tool_call> is not closed")
    fenced = FENCE.findall(text)
    text = (fenced[-1] if fenced else text).strip()
    if not text.startswith(("{", "[")) and not _is_call(text):
        return []  # prose
    return _several(text)


def _several(text: str) -> list[Call]:
    """One JSON value, several of them one after the other, or Python calls."""
    text = text.strip()
    if len(text) > LONGEST:
        raise Malformed(f"{len(text)} characters of calls")
    if not text:
        return []
    try:
        values = _json_values(text)
    except (ValueError, RecursionError) as error:
        calls = _python_calls(text)
        if calls is None:
            raise Malformed(f"neither JSON nor calls: {error}") from None
        return calls
    flat = [each for value in values for each in (value if isinstance(value, list) else [value])]
    return [_call(value) for value in flat]


def _json_values(text: str) -> list[Any]:
    decoder, place, values = json.JSONDecoder(), 0, []
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        values.append(value)
        while place < len(text) and text[place] in " \t\r\n,;":
            place += 1
    return values


def _call(value: Any) -> Call:
    """{"name": ..., "arguments": {...}} or {name: {...}}."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        arguments = next((value[key] for key in ARGUMENTS if key in value), {})
        if isinstance(arguments, str):  # some write the arguments as JSON in a string
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise Malformed(f"arguments of {value['name']}: {error}") from None
        if isinstance(arguments, dict):
            return Call(value["name"], arguments)
    elif isinstance(value, dict) and len(value) == 1:
        ((name, arguments),) = value.items()
        if isinstance(arguments, dict):
            return Call(name, arguments)
    raise Malformed(f"no call: {json.dumps(value)[:80]}")


def _is_call(text: str) -> bool:
    return re.match(r"[A-Za-z_][\w.]*\(", text) is not None and text.endswith(")")


def _python_calls(text: str) -> list[Call] | None:
    """[f(a=1), g(b=2)] by its syntax tree; None where it is something else. Arguments are literals."""
    try:
        tree = ast.parse(text, mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
        if not all(isinstance(node, ast.Call) and not node.args for node in nodes):
            return None
        return [
            Call(ast.unparse(node.func), {word.arg: _literal(word.value) for word in node.keywords if word.arg})
            for node in nodes
        ]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _literal(node: ast.expr) -> Any:
    """The value of a literal that JSON has too; anything else, an enumeration's name or a set, is its own text."""
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
    return value if _is_json(value) else ast.unparse(node)


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)
