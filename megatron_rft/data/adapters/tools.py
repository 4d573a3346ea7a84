"""Tool use: a conversation and its correct calls. The answer is

    RLLA      the reference response itself, with its <think>, <tool_call> and <response>
    API-Bank  JSON: [{"name": ..., "parameters": {...}}]
    BFCL      JSON: [{name: {parameter: [accepted values]}}], [] where no function fits the request
              (irrelevance), "any" where any call is right (relevance); the field `function` has the descriptions of
              the functions, as in BFCL

The tools of RLLA and API-Bank are written into the system turn.
"""

import ast
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatron_rft.data.fields import Fields, Row, as_row, conversation, system, unusable
from megatron_rft.data.text_rows import json_lines

REQUEST = re.compile(r"API-Request:\s*\[(.*)\]", re.DOTALL)
LEVEL = re.compile(r"level-(\d)")
KINDS = "simple|multiple|parallel_multiple|parallel|irrelevance|relevance"
CATEGORY = re.compile(rf"(?:live_)?({KINDS})(?:_python)?_\d")
WITHOUT_REFERENCE = {"irrelevance": [], "relevance": "any"}
RAW_DIALOGUE = unusable(
    "a raw dialogue, without the descriptions of its tools: take API-Bank's test-data/level-*-api.json, or convert it "
    "to rows of system (with the tools), user and answer, as ToolRL's level-*-api_processed.json has them"
)
NOT_SINGLE_TURN = unusable("a task of several turns")

BFCL_SYSTEM = """You can call these functions:

{functions}

Call those that the request needs, with all their required parameters, one JSON object a line:

<tool_call>
{{"name": "function name", "parameters": {{"parameter": "value"}}}}
</tool_call>

If none of them can serve the request, or a required parameter is missing, call none and say so."""


def rlla(fields: Fields) -> Row:
    """ToolRL's rows: as verl takes them (prompt, reward_model), or as its SFT file (instruction, input, output)."""
    if fields.has("prompt"):
        history, question = conversation(fields.items("prompt"), fields)
        answer = fields.object("reward_model").text("ground_truth")
        return as_row(question, answer, history=history)
    answer = fields.text("output")
    history = system(fields.text("instruction"))
    return as_row(fields.text("input"), answer, history=history, solution=answer)


def api_bank(fields: Fields) -> Row:
    """As ToolRL prepares it, with a dict in level 2 and a list of one elsewhere; or as published, with API-Request."""
    if fields.has("turns"):
        return RAW_DIALOGUE
    level = LEVEL.search(fields.file.name)
    about = {"level": level and level[1]}
    if fields.has("system"):
        calls = fields.json("answer")
        calls = [_call(each, fields) for each in (calls if isinstance(calls, list) else [calls])]
        return as_row(fields.text("user"), json.dumps(calls), history=system(fields.text("system")), **about)
    requested = REQUEST.search(fields.text("expected_output", "output"))
    if requested is None:
        return unusable("its reference is a reply, not a call")
    calls = parse_calls(requested[1], fields)
    history = system(fields.text("instruction"))
    return as_row(fields.text("input"), json.dumps(calls), history=history, **about)


def _call(value: Any, fields: Fields) -> dict[str, Any]:
    if not isinstance(value, dict) or not {"name", "parameters"} <= value.keys():
        raise fields.wrong(f"a call has a name and parameters, not {str(value)[:60]}")
    return {"name": value["name"], "parameters": value["parameters"]}


def parse_calls(text: str, fields: Fields) -> list[dict[str, Any]]:
    """Name(a='1', b=2), Other() -> calls. Literals only."""
    try:
        nodes = ast.parse(f"[{text}]", mode="eval").body.elts
        return [
            {"name": ast.unparse(node.func), "parameters": {kw.arg: ast.literal_eval(kw.value) for kw in node.keywords}}
            for node in nodes
        ]
    except (SyntaxError, ValueError, AttributeError):
        raise fields.wrong(f"its calls cannot be read: {text[:80]!r}") from None


def bfcl(fields: Fields) -> Row:
    """Right answers are in possible_answer/ beside the file, joined by id; irrelevance and relevance have none."""
    number = fields.text("id")
    if not fields.has("function"):
        return NOT_SINGLE_TURN
    named = CATEGORY.match(number)
    if named is None:
        category = re.sub(r"_[0-9-]+$", "", number)
        return unusable(f"of a category that is executed, or in Java or JavaScript: {category}")
    category = named[1]
    tools, turns = fields.items("function"), fields.items("question")
    if len(turns) != 1:
        return NOT_SINGLE_TURN
    history, question = conversation(turns[0], fields)
    allowed = WITHOUT_REFERENCE[category] if category in WITHOUT_REFERENCE else _allowed(fields, number)
    listed = BFCL_SYSTEM.format(functions="\n".join(json.dumps(tool) for tool in tools))
    own = [turn["content"] for turn in history if turn["role"] == "system"]
    return as_row(
        question,
        json.dumps(allowed),
        history=system("\n\n".join([*own, listed])) + [turn for turn in history if turn["role"] != "system"],
        function=tools,
        subject=category,
        id=number,
    )


@lru_cache(maxsize=16)
def _rows(file: Path, key: str) -> dict[str, Row]:
    """The rows of a file beside the questions, by a field of theirs."""
    return {row[key]: row for _, row in json_lines(file)}


def _allowed(fields: Fields, number: str) -> list:
    if fields.has("ground_truth"):  # joined already
        return fields.items("ground_truth")
    answers = fields.file.parent / "possible_answer" / fields.file.name
    answer = _rows(answers, "id").get(number, {}).get("ground_truth") if answers.is_file() else None
    if answer is None:
        raise fields.wrong(f"no answer to {number} in {answers}: BFCL's possible_answer belongs beside its questions")
    return answer
