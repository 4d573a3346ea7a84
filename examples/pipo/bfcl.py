"""The Berkeley function-calling leaderboard (BFCL) as a benchmark: its problems of one turn, and its rules.

    evaluation:
      benchmarks:
        bfcl:
          path: examples/pipo/bfcl.py:rows
          reward: {kind: own, function: "examples/pipo/bfcl.py:bfcl", maximum: 1.0}

Problems of several turns, of categories that are executed, and in Java or JavaScript are left out. The answer of a row
is JSON: [{name: {argument: [accepted values]}}], where "" among the values means that the argument may be left out;
[] where no function fits the request (irrelevance), "any" where any call is right (relevance). Calls match in any order
and are not executed. `function` has the descriptions of the functions.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.tools.calls import Call, Malformed, equal, tool_calls
from megatron_rft.utils.errors import DataError

REPOSITORY = "gorilla-llm/Berkeley-Function-Calling-Leaderboard"
KINDS = "simple|multiple|parallel_multiple|parallel|irrelevance|relevance"
CATEGORY = re.compile(rf"(?:live_)?({KINDS})(?:_python)?_\d")
WITHOUT_REFERENCE = {"irrelevance": [], "relevance": "any"}
TYPES = {
    "string": str, "integer": int, "float": float, "number": float, "boolean": bool, "array": list, "list": list,
    "tuple": list, "dict": dict, "object": dict,
}  # fmt: skip
ANY = "any"  # the reference of relevance rows: any call is right
LOOSE = re.compile(r"[ ,./\-_*^]")  # what the leaderboard ignores in texts
SYSTEM = """You can call these functions:

{functions}

Call those that the request needs, with all their required parameters, one JSON object a line:

<tool_call>
{{"name": "function name", "parameters": {{"parameter": "value"}}}}
</tool_call>

If none of them can serve the request, or a required parameter is missing, call none and say so."""


def rows(_split: str, limit: int | None) -> list[dict[str, Any]]:
    """The problems, from the Hugging Face hub."""
    from huggingface_hub import snapshot_download

    wanted = ["BFCL_*.json", "possible_answer/*"]
    return list(rows_of(Path(snapshot_download(REPOSITORY, repo_type="dataset", allow_patterns=wanted))))[:limit]


def rows_of(folder: Path) -> Iterator[dict[str, Any]]:
    """The problems of a copy of the repository, whose answers are in possible_answer/."""
    for file in sorted(folder.glob("BFCL_*.json*")):
        answers = folder / "possible_answer" / file.name
        known = {row["id"]: row["ground_truth"] for row in _lines(answers)} if answers.is_file() else {}
        for row in _lines(file):
            category = CATEGORY.match(row["id"])
            if category is None or "function" not in row or len(row["question"]) != 1:
                continue
            if category[1] not in WITHOUT_REFERENCE and row["id"] not in known:
                raise DataError(f"no answer to {row['id']} in {answers}: possible_answer belongs beside the questions")
            yield _row(row, category[1], WITHOUT_REFERENCE.get(category[1], known.get(row["id"])))


def _row(row: dict[str, Any], category: str, accepted: Any) -> dict[str, Any]:
    own = [turn["content"] for turn in row["question"][0] if turn["role"] == "system"]
    listed = SYSTEM.format(functions="\n".join(map(json.dumps, row["function"])))
    turns = [turn for turn in row["question"][0] if turn["role"] != "system"]
    asked = [{"role": "system", "content": "\n\n".join([*own, listed])}, *turns]
    described = {"function": row["function"], "subject": category, "id": row["id"]}
    return {"question": asked, "answer": json.dumps(accepted), **described}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in file.read_text().splitlines() if line.strip())


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
        raise ValueError(f"not a list of accepted calls: {prompt.answer[:80]}") from None
    return pairs


def _described(prompt: Prompt) -> dict[str, dict]:
    """Return the parameters of each function as JSON Schema, by its name."""
    functions = prompt.fields.get("tools") or prompt.fields.get("function") or []
    try:
        functions = json.loads(functions) if isinstance(functions, str) else functions
        found = {each["name"]: each.get("parameters") or {} for each in functions}
        assert all(isinstance(each.get("properties", {}), dict) for each in found.values())
    except (ValueError, KeyError, AttributeError, TypeError, AssertionError):
        raise ValueError(f"its tools are no list of described functions: {str(functions)[:80]}") from None
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
