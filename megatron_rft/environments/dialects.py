"""The forms of requests and answers: OpenAI's chat completions, which the endpoint speaks, and what becomes of it."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Event = tuple[str | None, dict[str, Any]]  # its name, and its data


@dataclass(frozen=True)
class Dialect:
    """`asked`: a request -> one of chat completions. `whole`, `events`: (chat completion, request) -> the answer at
    once, or as a stream. `error`: of a refusal."""

    asked: Callable[[dict], dict]
    whole: Callable[[dict, dict], dict]
    events: Callable[[dict, dict], Iterable[Event]]
    error: Callable[[Any], dict]


def openai_error(refused: Any) -> dict[str, Any]:
    kind = "invalid_request_error" if refused.status < 500 else "server_error"
    return {"error": {"message": str(refused), "type": kind, "param": None, "code": refused.code}}


def chat_events(whole: dict, body: dict) -> Iterable[Event]:
    head = {name: value for name, value in whole.items() if name not in ("choices", "usage")}
    head |= {"object": "chat.completion.chunk"}
    for choice in whole["choices"]:
        message = dict(choice["message"])
        calls = [call | {"index": place} for place, call in enumerate(message.pop("tool_calls", []))]
        texts = [{name: text} for name in ("reasoning_content", "content") if (text := message.get(name))]
        deltas = [{"role": "assistant", "content": ""}, *texts, *[{"tool_calls": [call]} for call in calls], {}]
        for place, delta in enumerate(deltas):
            finish = choice["finish_reason"] if place == len(deltas) - 1 else None
            scored = choice["logprobs"] if place == 1 else None
            part = {"index": choice["index"], "delta": delta, "finish_reason": finish, "logprobs": scored}
            yield None, head | {"choices": [part]}
    if (body.get("stream_options") or {}).get("include_usage"):
        yield None, head | {"choices": [], "usage": whole["usage"]}


# ---- Anthropic's /v1/messages

BLOCKS = {"text": "text", "thinking": "thinking"}  # types of blocks that are texts -> the field that has it
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PASSED = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k")


def from_messages(body: dict) -> dict:
    """Messages of the system stay where they are; what follows a turn would else change what is before it."""
    messages = [{"role": "system", "content": _blocks(body["system"])}] if body.get("system") else []
    for message in body["messages"]:
        messages += _from_message(message["role"], message["content"])
    asked = {name: body[name] for name in PASSED if name in body} | {"messages": messages}
    if body.get("tools"):
        asked["tools"] = [_function(tool, tool["input_schema"]) for tool in body["tools"]]
    choice = (body.get("tool_choice") or {}).get("type", "auto")
    return asked | {"stop": body.get("stop_sequences"), "tool_choice": choice}


def _from_message(role: str, content: Any) -> list[dict]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    results = [
        {"role": "tool", "tool_call_id": each["tool_use_id"], "content": _blocks(each.get("content"))}
        for each in blocks
        if each["type"] == "tool_result"
    ]
    calls = [_call(each["id"], each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"]
    rest = [each for each in blocks if each["type"] not in ("tool_result", "tool_use", "thinking", "redacted_thinking")]
    message: dict[str, Any] = {"role": role, "content": _blocks(rest)}
    if calls:
        message["tool_calls"] = calls
    return [*results, *([message] if rest or calls or not results else [])]


def _blocks(content: Any) -> Any:
    """Blocks as the parts of a message: only text is taken there."""
    if not isinstance(content, list):
        return content
    return [{"type": each.get("type"), "text": each.get("text", "")} for each in content]


def _function(tool: dict, schema: Any) -> dict:
    about = {"name": tool["name"], "description": tool.get("description", ""), "parameters": schema}
    return {"type": "function", "function": about}


def _call(id: str, name: str, arguments: Any) -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def to_message(whole: dict, body: dict) -> dict:
    choice = whole["choices"][0]
    message, usage = choice["message"], whole["usage"]
    blocks = []
    if message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": message["reasoning_content"], "signature": ""})
    if message["content"] or not message.get("tool_calls"):
        blocks.append({"type": "text", "text": message["content"] or ""})
    for call in message.get("tool_calls", ()):
        given = json.loads(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given})
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    counts = {"input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"]}
    counts |= {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
    about = {"id": whole["id"].replace("chatcmpl", "msg"), "type": "message", "role": "assistant"}
    ended = {"stop_reason": STOPS[choice["finish_reason"]], "stop_sequence": None}
    return about | {"model": whole["model"], "content": blocks, **ended, "usage": counts}


def message_events(whole: dict, body: dict) -> Iterable[Event]:
    message = to_message(whole, body)
    started = message | {"content": [], "stop_reason": None}
    yield "message_start", {"type": "message_start", "message": started}
    for index, block in enumerate(message["content"]):
        kind = block["type"]
        given = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}[kind]
        begun = {"type": "content_block_start", "index": index, "content_block": block | given}
        yield "content_block_start", begun
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            delta = {"type": f"{kind}_delta", BLOCKS[kind]: block[BLOCKS[kind]]}
        yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield "message_delta", {"type": "message_delta", "delta": ended, "usage": message["usage"]}
    yield "message_stop", {"type": "message_stop"}


def anthropic_error(refused: Any) -> dict[str, Any]:
    kind = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
    return {
        "type": "error",
        "error": {"type": kind.get(refused.status, "invalid_request_error"), "message": str(refused)},
    }


CHAT = Dialect(lambda body: body, lambda whole, body: whole, chat_events, openai_error)
MESSAGES = Dialect(from_messages, to_message, message_events, anthropic_error)
DIALECTS = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES}
