"""Tool calls by the Berkeley leaderboard's rules (BFCL): simple, multiple, parallel, (ir)relevance; 1 or 0.

The reference lists, for each call, the accepted values of each argument ("" among them: it may be left out); the field
`tools` (or `function`) of the row has the argument types. Calls match in any order; an empty reference requires no
call, the reference "any" at least one call of any kind. Calls are not executed, and Java and JavaScript are not
supported.
"""

import json
import re
from typing import Any

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.tools.calls import BrokenReference, Call, Malformed, equal, tool_calls

TYPES = {
    "string": str, "integer": int, "float": float, "number": float, "boolean": bool, "array": list, "list": list,
    "tuple": list, "dict": dict, "object": dict,
}  # fmt: skip
ANY = "any"  # the reference of relevance rows: any call is right
LOOSE = re.compile(r"[ ,./\-_*^]")  # what the leaderboard ignores in texts


def bfcl(prompt: Prompt, text: str) -> Score:
    wanted = _reference(prompt)
    functions = _described(prompt)
    try:
        properties = {name: each.get("properties", {}) for name, each in functions.items()}
        made = tool_calls(text, properties, quoted=not wanted)
    except Malformed as error:
        return _verdict(str(error))
    if wanted == ANY:
        return _verdict(None if made else "no call, expected at least one")
    if not wanted:
        return _verdict(f"no function fits, {made[0].name} is called" if made else None)
    if len(made) != len(wanted):
        return _verdict(f"{len(made)} calls, expected {len(wanted)}")
    for possible in wanted:
        problems = [_mismatch(possible, call, functions) for call in made]
        if None not in problems:
            return _verdict(problems[0])
        made.pop(problems.index(None))
    return _verdict(None)


def _verdict(problem: str | None) -> Score:
    return Score(1.0, "correct", correct=True) if problem is None else Score(0.0, problem, correct=False)


def _reference(prompt: Prompt) -> list[tuple[str, dict[str, list]]] | str:
    """Return [{function: {argument: accepted values}}] as pairs, or ANY."""
    try:
        calls = json.loads(prompt.answer)
        if calls == ANY:
            return ANY
        pairs = [pair for call in calls for pair in call.items()]
        assert all(isinstance(values, list) for _, arguments in pairs for values in arguments.values())
    except (ValueError, AttributeError, TypeError, AssertionError):
        raise BrokenReference(f"not a list of accepted calls: {prompt.answer[:80]}") from None
    return pairs


def _described(prompt: Prompt) -> dict[str, dict]:
    """Return the parameters of each function as JSON Schema, by its name."""
    functions = prompt.fields.get("tools") or prompt.fields.get("function") or []
    try:
        functions = json.loads(functions) if isinstance(functions, str) else functions
        found = {each["name"]: each.get("parameters") or {} for each in functions}
        assert all(isinstance(each.get("properties", {}), dict) for each in found.values())
    except (ValueError, KeyError, AttributeError, TypeError, AssertionError):
        raise BrokenReference(f"its tools are no list of described functions: {str(functions)[:80]}") from None
    return found


def _mismatch(possible: tuple[str, dict[str, list]], call: Call, functions: dict[str, dict]) -> str | None:
    """Return why a call is not accepted, or None. Dots in a name may be written as underscores."""
    name, accepted = possible
    if call.name != name and call.name != name.replace(".", "_"):
        return f"{call.name} is called, expected {name}"
    described = functions.get(name, {})
    properties = described.get("properties", {})
    for key in described.get("required", []):
        if key not in call.arguments:
            return f"{name}: the argument {key} is missing"
    for key, value in call.arguments.items():
        if key not in accepted:
            return f"{name}: unknown argument {key}"
        kind = properties.get(key, {}).get("type", "any")
        value = list(value) if kind == "tuple" and isinstance(value, tuple) else value  # the reference has lists
        documented = _has_type(value, kind)
        if not documented and not _is_variable(value, accepted[key]):
            return f"{name}: {key} is {value!r}, expected {kind}"
        same = _accepts if documented else equal
        if not any(same(each, value) for each in accepted[key]):
            return f"{name}: {key} is {value!r}, expected one of {accepted[key]!r}"
    for key, values in accepted.items():
        if key not in call.arguments and "" not in values:
            return f"{name}: the argument {key} is missing"
    return None


def _has_type(value: Any, kind: str) -> bool:
    """Return whether a value has the documented type; a whole number is also a float."""
    wanted = TYPES.get(kind)
    return wanted is None or type(value) is wanted or (wanted is float and type(value) is int)


def _is_variable(value: Any, accepted: list) -> bool:
    """Return whether values of another type are accepted, such as a variable's name."""
    return type(value) in {type(each) for each in accepted if each != ""}


def _accepts(possible: Any, value: Any) -> bool:
    """Compare a value: texts without case and punctuation, numbers by value, dictionaries key by key."""
    if isinstance(possible, str) and isinstance(value, str):
        return _loose(possible) == _loose(value)
    if isinstance(possible, list) and isinstance(value, list | tuple):
        return len(possible) == len(value) and all(map(_accepts, possible, value))
    if isinstance(possible, dict) and isinstance(value, dict):
        return value.keys() <= possible.keys() and all(
            any(_accepts(each, value[key]) for each in _options(options)) if key in value else "" in _options(options)
            for key, options in possible.items()
        )
    return equal(possible, value)


def _options(options: Any) -> list:
    return options if isinstance(options, list) else [options]


def _loose(text: str) -> str:
    return LOOSE.sub("", text).lower().replace("'", '"')
