"""Parses tool calls in the formats of common models, as text and JSON. A response is never evaluated.

One parser for each format, tried in this order; the first whose marker is in the text reads it:

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>       Hermes, Qwen; one or more, each with one or more
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}               Llama 3: JSON, or Python calls, up to <|eom_id|>
    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]               Mistral; also [TOOL_CALLS]f[ARGS]{"a": 1}
    <function=f>{"a": 1}</function>                                   Llama 3.1, Qwen3-Coder (<parameter=a>)
    Action: f / Action Input: {"a": 1}                                ReAct, on lines of their own
    {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}  OpenAI's message, or the list alone
    [{"name": "f", "parameters": {"a": 1}}, {"f": {"a": 1}}]          JSON, with or without a code fence
    [f(a=1), g.h(b="x")]                                              Python calls with keyword arguments

The last three may follow prose, from the beginning of a line on or after a colon. A marker without a readable call
is an attempt at one.
"""

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
FENCE = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
LLAMA = re.compile(r"<\|python_tag\|>(.*?)(?:<\|eom_id\|>|<\|eot_id\|>|(?=<\|python_tag\|>)|\Z)", re.DOTALL)
MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{))?")
FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
ACTION = re.compile(r"^[ \t>*]*Action[ \t*]*:[ \t*]*`?([\w.-]+)`?[ \t]*$", re.MULTILINE)
INPUT = re.compile(r"[ \t>*]*Action[ _]Input[ \t*]*:[ \t*]*(?:```\w*)?\s*")
MARKERS = re.compile(
    r"</?\s*tool_?calls?\b|<\|python_tag\|>|\[TOOL_CALLS\]|</?function\b|^[ \t>*]*Action(?:[ _]Input)?[ \t*]*:"
    r"|\"(?:tool_calls|function_call)\"\s*:|\"name\"\s*:\s*\"[^\"]*\"\s*,\s*\"(?:arguments|parameters)\"\s*:",
    re.MULTILINE | re.IGNORECASE,
)
BARE = re.compile(r"(?:^|:)[ \t]*(?=[\[{]|[A-Za-z_][\w.]*\()", re.MULTILINE)
ARGUMENTS = ("arguments", "parameters", "args")
LONGEST = 20_000  # characters that are read as calls
MOST_STARTS = 20  # places in prose from which calls are read


class Malformed(ValueError):
    """The text has content that cannot be read as calls. `attempt`: it was meant as a call, and is not other JSON."""

    def __init__(self, message: str, attempt: bool = True):
        super().__init__(message)
        self.attempt = attempt


class BrokenReference(ValueError):
    """A row's own calls cannot be read."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


def equal(a: Any, b: Any) -> bool:
    """Compare values from JSON: 1 equals 1.0 and does not equal true."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def tool_calls(text: str) -> list[Call]:
    """Return the calls of a response, possibly none. Raises Malformed."""
    text = text.rpartition("</think>")[2]
    for parse in (_tagged, _llama, _mistral, _functions, _actions, _bare):
        calls = parse(text)
        if calls is not None:
            return calls
    if marker := MARKERS.search(text):
        raise Malformed(f"a broken call: {text[marker.start() :][:80]}")
    return []


def _tagged(text: str) -> list[Call] | None:
    if "<tool_call>" not in text:
        return None
    tagged = TAGGED.findall(text)
    if text.count("<tool_call>") > len(tagged):
        raise Malformed("a <tool_call> is not closed")
    return [call for part in tagged for call in (_functions(part) if "<function=" in part else _several(part))]


def _llama(text: str) -> list[Call] | None:
    parts = LLAMA.findall(text)
    return [call for part in parts for call in _several(part)] if parts else None


def _mistral(text: str) -> list[Call] | None:
    found = list(MISTRAL.finditer(text))
    if not found:
        return None
    calls = []
    for match, after in zip(found, [*found[1:], None], strict=True):
        content = text[match.end() : after.start() if after else None].replace("</s>", "")
        calls += [_call({"name": match["name"], "arguments": content})] if match["name"] else _several(content)
    return calls


def _functions(text: str) -> list[Call] | None:
    if "<function=" not in text:
        return None
    found = FUNCTION.findall(text)
    if text.count("<function=") > len(found):
        raise Malformed("a <function=...> is not closed")
    return [
        Call(name, {key: _value(value) for key, value in PARAMETER.findall(content)})
        if "<parameter=" in content
        else _call({"name": name, "arguments": content.strip()})
        for name, content in found
    ]


def _value(text: str) -> Any:
    """Parse a text as JSON, or return it unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _actions(text: str) -> list[Call] | None:
    found = list(ACTION.finditer(text))
    if not found:
        return None
    calls = []
    for match in found:
        given = INPUT.match(text, match.end() + 1)
        if given is None:
            raise Malformed(f"Action: {match[1]} without an Action Input")
        try:
            arguments, _ = json.JSONDecoder().raw_decode(text, given.end())
        except (ValueError, RecursionError) as error:
            raise Malformed(f"Action Input of {match[1]}: {error}") from None
        calls.append(_call({"name": match[1], "arguments": arguments}))
    return calls


def _bare(text: str) -> list[Call] | None:
    """Return JSON or Python calls in the last fence, in the whole text, or at its end after prose."""
    fenced = FENCE.findall(text)
    text = (fenced[-1] if fenced else text).strip()
    if text.startswith(("{", "[")) or _is_call(text):
        return _several(text)
    for start in [match.end() for match in BARE.finditer(text)][:MOST_STARTS]:
        try:
            if calls := _several(text[start:]):
                return calls
        except Malformed:
            continue
    return None


def _several(text: str) -> list[Call]:
    """Parse one JSON value, several consecutive ones, or Python calls."""
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
            attempt = bool(MARKERS.search(text) or re.search(r"[A-Za-z_][\w.]*\(", text))
            raise Malformed(f"neither JSON nor calls: {error}", attempt) from None
        return calls
    return [_call(each) for value in values for each in _flat(value)]


def _flat(value: Any) -> list[Any]:
    """Return the calls of a list or of OpenAI's message."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        return value["tool_calls"]
    return value if isinstance(value, list) else [value]


def _json_values(text: str) -> list[Any]:
    decoder, place, values = json.JSONDecoder(), 0, []
    while place < len(text):
        value, place = decoder.raw_decode(text, place)
        values.append(value)
        while place < len(text) and text[place] in " \t\r\n,;":
            place += 1
    return values


def _call(value: Any) -> Call:
    """{"name": ..., "arguments": {...}} or {name: {...}}; within "function" or "function_call", as OpenAI writes it."""
    if isinstance(value, dict) and isinstance(value.get("function") or value.get("function_call"), dict):
        inner = value.get("function") or value.get("function_call")
        if isinstance(inner.get("name"), str):
            value = inner
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
    text = json.dumps(value)
    raise Malformed(f"no call: {text[:80]}", attempt='"name"' in text or bool(MARKERS.search(text)))


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
    """Return the value of a literal that JSON supports; anything else, such as a name or a set, as its source text."""
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
