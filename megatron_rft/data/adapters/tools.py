"""Tool use: a conversation and its correct calls. The answer is

    RLLA      the reference response itself, with its <think>, <tool_call> and <response>
    API-Bank  JSON: [{"name": ..., "parameters": {...}}]

The tools of RLLA and API-Bank are written into the system turn.
"""

import ast
import json
import re
from typing import Any

from megatron_rft.data.fields import Fields, Row, as_row, conversation, system, unusable

REQUEST = re.compile(r"API-Request:\s*\[(.*)\]", re.DOTALL)
LEVEL = re.compile(r"level-(\d)")
RAW_DIALOGUE = unusable(
    "a raw dialogue, without the descriptions of its tools: take API-Bank's test-data/level-*-api.json, or convert it "
    "to rows of system (with the tools), user and answer, as ToolRL's level-*-api_processed.json has them"
)


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
