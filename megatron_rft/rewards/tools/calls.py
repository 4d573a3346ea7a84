"""Parses tool calls in the formats of common models, as text and JSON. A response is never evaluated.

One parser for each format, tried in this order; the first whose marker is in the text reads it:

    <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>       Hermes, Qwen; one or more, each with one or more;
                                                                      <|tool_call|>, <functioncall>, <function_call>;
                                                                      also in a code fence within the tag;
                                                                      GLM: f<arg_key>a</arg_key><arg_value>1</arg_value>
    <|python_tag|>{"name": "f", "parameters": {"a": 1}}               Llama 3: JSON, or Python calls, up to <|eom_id|>;
                                                                      Llama 4: <|python_start|>[f(a=1)]<|python_end|>
    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]               Mistral; also [TOOL_CALLS]f[ARGS]{"a": 1}
    <function=f>{"a": 1}</function>                                   Llama 3.1, Qwen3-Coder (<parameter=a>);
                                                                      <invoke name="f"><parameter name="a">;
                                                                      DeepSeek-V3.2's <｜DSML｜invoke name="f">
    <｜tool▁sep｜>f {"a": 1}, to=functions.f <|message|>{"a": 1}        DeepSeek; gpt-oss; Kimi (functions.f:0);
                                                                      DeepSeek-V3.1: f<｜tool▁sep｜>{"a": 1}
    {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}  OpenAI's message, or the list alone
    [{"name": "f", "parameters": {"a": 1}}, {"f": {"a": 1}}]          JSON or Python literals, also in a code fence
    [f(a=1), g.h(b="x")]                                              Python calls with keyword arguments

The last three may follow prose, from the beginning of a line or sentence on or after a colon, and JSON may also precede
it. A marker without a readable call is an attempt at one. Where no call is wanted, one between backticks is a call, not
only a mention, if it has arguments: `f(a=1)` is a call, `f()` the name of a function.
"""

import ast
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from megatron_rft.rewards.base import without_thoughts

TAG = r"<\|?(?:tool_call|function_?call)s?\|?>"
# What a tag encloses holds no second opening tag: otherwise tags that are never closed would take quadratic time.
TAGGED = re.compile(TAG + rf"((?:(?!{TAG}).)*?)" + r"<(?:/|\|/|/\|)(?:tool_call|function_?call)s?\|?>", re.DOTALL)
QUOTED = re.compile(r"(?<!`)(`{1,3})(?!`)(?:\w*\n)?([^`]+)\1")
FENCE = re.compile(r"```(?:\w*\n)?(.*?)```", re.DOTALL)
DSML = "｜DSML｜"  # the prefix of DeepSeek-V3.2's tags
LLAMA = re.compile(
    r"<\|python_(?:tag|start)\|>(.*?)(?:<\|eom_id\|>|<\|eot_id\|>|<\|python_end\|>|(?=<\|python_tag\|>)|\Z)", re.DOTALL
)
MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(?:(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{))?")
OPENED = re.compile(r"<(?:function=|invoke name=)")
FUNCTION = re.compile(
    rf"<(?:function=|invoke name=\"?)([^<>\s\"]+)\"?>((?:(?!{OPENED.pattern}).)*?)</(?:function|invoke)>", re.DOTALL
)
PARAMETER = re.compile(
    r"<parameter(?:=| name=\"?)([^<>\s\"]+)\"?(?: string=\"(true|false)\")?>\n?(.*?)\n?</parameter>", re.DOTALL
)
CLOSED = "</parameter>"
NAME = re.compile(r"\s*([\w.-]+)\s*(?=<arg_key>)")
PAIR = re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>", re.DOTALL)
HEADER = re.compile(
    r"(?:<｜tool▁call▁begin｜>(?=[\w.-]+<｜tool▁sep｜>\s*\{)|<｜tool▁sep｜>|\bto=functions\.|<\|tool_call_begin\|>functions\.)"
    r"([\w.-]+)[^{]*"
)
MARKERS = re.compile(
    r"</?\|?/?\s*(?:tool_?calls?|function_?calls?|invoke|tools?)\b|<\|python_(?:tag|start)\|>|\[TOOL_CALLS\]"
    r"|</?function\b|[<｜]tool▁|\bto=functions\."
    r"|[\"'](?:tool_calls|function_call)[\"']\s*:|[\"']name[\"']\s*:\s*[\"'][^\"']*[\"']\s*,\s*[\"'](?:arg|par|inp)"
    r"|[\"'](?:arguments|parameters)[\"']\s*:\s*\{"
    r"|(?:^|:)[ \t]*(?:\[[A-Za-z_][\w.]*\(|[A-Za-z_][\w.]*\(\w+=)|\A\s*[A-Za-z_][\w.]*\([^()\n]*\)\s*\Z",
    re.MULTILINE | re.IGNORECASE,
)
BARE = re.compile(r"(?:^|[:.!?])[ \t]*(?=[\[{]|[A-Za-z_][\w.]{0,200}+\()", re.MULTILINE)  # bounded: "a.a.a" has many
NAMES = ("name", "function", "tool", "tool_name", "action")
ARGUMENTS = ("arguments", "parameters", "args", "input", "tool_input", "tool_arguments", "action_input")
LONGEST = 20_000  # characters that are read as calls
MOST_STARTS = 20  # places in prose from which calls are read


class Malformed(Exception):
    """The text attempts a call that cannot be read."""


class BrokenReference(ValueError):
    """A row's own calls cannot be read."""


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]


def equal(a: Any, b: Any) -> bool:
    """Compare values from JSON: 1 equals 1.0 and does not equal true, also within lists and objects."""
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(value, b[key]) for key, value in a.items())
    return isinstance(a, bool) == isinstance(b, bool) and a == b


class Written(str):
    """An argument between tags: only the function's description says whether 2022 is a number or a text."""


def both_calls(reference: str, text: str) -> tuple[list[Call], list[Call] | None, str]:
    """Return the calls of a reference response and of another one; for a malformed one None, and why."""
    try:
        wanted = tool_calls(reference)
    except Malformed as error:
        raise BrokenReference(str(error)) from None
    texts = {
        call.name: {key: {"type": "string"} for key, value in call.arguments.items() if isinstance(value, str)}
        for call in wanted
    }
    try:
        return wanted, tool_calls(text, texts, quoted=not wanted), ""
    except Malformed as error:
        return wanted, None, str(error)


def tool_calls(text: str, described: dict[str, dict] | None = None, *, quoted: bool = False) -> list[Call]:
    """Return the calls of a response, possibly none. `described`: properties (JSON Schema) of the arguments of each
    function, for formats that write all values as text. `quoted`: also between backticks. Raises Malformed."""
    calls = _read(text) or (_quoted(without_thoughts(text)) if quoted else [])
    try:
        json.dumps([[call.name, call.arguments] for call in calls], ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError) as error:  # half of a surrogate pair: no file and no tokenizer takes it
        raise Malformed(f"a call that cannot be written: {error}") from None
    return [_typed(call, (described or {}).get(call.name, {})) for call in calls]


def _typed(call: Call, properties: dict[str, dict]) -> Call:
    kinds = {key: each.get("type") for key, each in properties.items() if isinstance(each, dict)}
    given = call.arguments.items()
    return Call(call.name, {k: _value(v, kinds.get(k)) if isinstance(v, Written) else v for k, v in given})


def _read(text: str) -> list[Call]:
    text = without_thoughts(text).replace(DSML, "")
    for parse in (_tagged, _llama, _mistral, _functions, _headed, _bare):
        calls = parse(text)
        if calls is not None:
            return calls
    if marker := MARKERS.search(text):
        raise Malformed(f"a broken call: {text[marker.start() :][:80]}")
    return []


def _tagged(text: str) -> list[Call] | None:
    tagged = TAGGED.findall(text)
    if len(re.findall(TAG, text)) > len(tagged):
        raise Malformed("a <tool_call> is not closed")
    calls = []
    for part in tagged:
        fence = FENCE.fullmatch(part.strip())  # around all of it
        calls += _functions(part) or _keyed(part) or _several(fence[1] if fence else part)
    return calls if tagged else None


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
    found = FUNCTION.findall(text)
    if len(OPENED.findall(text)) > len(found):
        raise Malformed("a <function=...> is not closed")
    return [_function(name, content) for name, content in found] or None


def _function(name: str, content: str) -> Call:
    closed = content[: content.rfind(CLOSED) + len(CLOSED)]  # a search behind it would take quadratic time in vain
    if parameters := PARAMETER.findall(closed):
        texts = [(key, text if kind == "true" else Written(text)) for key, kind, text in parameters]
        return Call(name, _unique(texts))
    return _call({"name": name, "arguments": content.strip()})


def _keyed(text: str) -> list[Call] | None:
    """Return the call of a name that pairs of keys and values follow."""
    name, rest = NAME.match(text), PAIR.sub("", text)
    if name is None:
        return None
    if rest.strip() != name[1]:
        raise Malformed(f"{name[1]} without readable arguments")
    return [Call(name[1], _unique([(key.strip(), Written(value.strip())) for key, value in PAIR.findall(text)]))]


def _value(text: str, kind: Any = None) -> Any:
    """Parse a text as JSON, or return it unchanged, as it is where a text is wanted."""
    if kind == "string":
        return str(text)
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (Malformed, ValueError, RecursionError):
        return str(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise Malformed(f"an argument twice: {', '.join(key for key, _ in pairs)[:80]}")
    return found


def _headed(text: str) -> list[Call] | None:
    """Return the calls of formats that write a name and then its arguments."""
    calls = []
    for match in HEADER.finditer(text):
        values, _ = _json_values(text[match.end() :][:LONGEST], most=1)
        if not values:
            raise Malformed(f"{match[1]} without readable arguments")
        calls.append(_call({"name": match[1], "arguments": values[0]}))
    return calls or None


def _bare(text: str) -> list[Call] | None:
    """Return JSON or Python calls in the last fence, in the whole text, or after prose."""
    fenced = FENCE.findall(text)
    text = (fenced[-1] if fenced else text).strip(" \t\r\n`")
    for start in [0, *(match.end() for match in BARE.finditer(text))][:MOST_STARTS]:
        try:
            calls = _several(text[start:])
            if calls or start == 0:
                return calls
        except Malformed:
            continue
    return None


def _quoted(text: str) -> list[Call]:
    """Return the calls with arguments between backticks."""
    calls = []
    for _, content in QUOTED.findall(text)[:MOST_STARTS]:
        with suppress(Malformed):
            calls += [call for call in _several(content) if call.arguments]
    return calls


def _several(text: str) -> list[Call]:
    """Parse JSON values, of which the first begins the text, or Python calls. Raises Malformed if it is neither."""
    text = text.strip()
    if len(text) > LONGEST:
        raise Malformed(f"{len(text)} characters of calls")
    values, rest = _json_values(text)
    if values and not re.match(r"[\[{]", rest) and not MARKERS.search(rest):
        return [_call(each) for value in values for each in _flat(value)]
    calls = _python_calls(text)
    if calls is None:
        raise Malformed(f"neither JSON nor calls: {text[:80]}")
    return calls


def _flat(value: Any) -> list[Any]:
    """Return the calls of a list or of OpenAI's message."""
    if isinstance(value, dict) and isinstance(value.get("tool_calls"), list):
        return value["tool_calls"]
    return value if isinstance(value, list) else [value]


def _json_values(text: str, most: int = 1000) -> tuple[list[Any], str]:
    """Return the JSON values, objects and lists, that begin a text, and what follows them. A text that is a Python
    literal alone is one value too."""
    decoder, place, values = json.JSONDecoder(object_pairs_hook=_unique), 0, []
    with suppress(ValueError, RecursionError):
        while place < len(text) and text[place] in "[{" and len(values) < most:
            value, place = decoder.raw_decode(text, place)
            values.append(value)
            while place < len(text) and text[place] in " \t\r\n,;":
                place += 1
    if not values and text[:1] in ("[", "{"):
        with suppress(Malformed, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value, place = _evaluated(ast.parse(text.strip(" `\n"), mode="eval")), len(text)
            values = [value] if _is_json(value) else []
    return values, text[place:]


def _call(value: Any) -> Call:
    """{"name": ..., "arguments": {...}} or {name: {...}}; within "function" or "function_call", as OpenAI writes it."""
    table = value if isinstance(value, dict) else {}
    inner = table.get("function") or table.get("function_call")
    if isinstance(inner, dict) and isinstance(inner.get("name"), str):
        value = table = inner
    key = next((key for key in NAMES if isinstance(table.get(key), str)), None)
    given = next((each for each in ARGUMENTS if key and each in table), None)
    name = arguments = None
    if key == "name" or given:
        name, arguments = table[key], table[given] if given else {}
        if isinstance(arguments, str):  # some write the arguments as JSON in a string
            try:
                arguments = json.loads(arguments or "{}", object_pairs_hook=_unique)
            except (Malformed, ValueError) as error:
                raise Malformed(f"arguments of {name}: {error}") from None
    elif len(table) == 1:
        ((name, arguments),) = table.items()
    if isinstance(arguments, dict):
        return Call(name, arguments)
    raise Malformed(f"no call: {json.dumps(value)[:80]}")


def _python_calls(text: str) -> list[Call] | None:
    """[f(a=1), g(b=2)], or a call on each line, by the syntax tree; None if it is something else. Arguments are
    literals."""
    try:
        lines = ast.parse(text).body
        values = [line.value for line in lines if isinstance(line, ast.Expr | ast.Assign)]
        nodes = [node for each in values for node in (each.elts if isinstance(each, ast.List | ast.Tuple) else [each])]
        are_calls = all(isinstance(node, ast.Call) and not node.args for node in nodes)
        if not nodes or len(values) < len(lines) or not are_calls:
            return None
        words = [[(word.arg, _literal(word.value)) for word in node.keywords if word.arg] for node in nodes]
        return [Call(ast.unparse(node.func), _unique(each)) for node, each in zip(nodes, words, strict=True)]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        return None


def _evaluated(node: ast.AST) -> Any:
    for each in ast.walk(node):
        if isinstance(each, ast.Dict):
            _unique([(ast.unparse(key), None) for key in each.keys if key])
    return ast.literal_eval(node)


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal that JSON supports; anything else, such as a name or a set, as its source text."""
    try:
        value = _evaluated(node)
    except ValueError:
        return ast.unparse(node)
    return value if _is_json(value) else ast.unparse(node)


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)
