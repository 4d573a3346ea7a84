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
    head = {name: whole[name] for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
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

ENDED = ("stop_reason", "stop_sequence")
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PASSED = ("model", "stream", "max_tokens", "temperature", "top_p", "top_k")


def from_messages(body: dict) -> dict:
    """Messages of the system stay where they are; what follows a turn would else change what is before it."""
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    for message in body["messages"]:
        messages += _from_message(message["role"], message["content"])
    asked = {name: body[name] for name in PASSED if name in body} | {"messages": messages}
    if body.get("tools"):
        asked["tools"] = [_function(tool, tool["input_schema"]) for tool in body["tools"]]
    choice = (body.get("tool_choice") or {}).get("type", "auto")
    form = body.get("output_format") or (body.get("output_config") or {}).get("format")
    return asked | {"stop": body.get("stop_sequences"), "tool_choice": choice, "response_format": form}


def _from_message(role: str, content: Any) -> list[dict]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    told = [each for each in blocks if each["type"] == "tool_result"]
    results = [{"role": "tool", "tool_call_id": each["tool_use_id"], "content": each.get("content")} for each in told]
    calls = [called(each["id"], each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"]
    rest = [each for each in blocks if each["type"] not in ("tool_result", "tool_use", "thinking", "redacted_thinking")]
    message = {"role": role, "content": rest, "tool_calls": calls}
    return [*results, *([message] if rest or calls or not results else [])]


def _function(tool: dict, schema: Any) -> dict:
    about = {"name": tool["name"], "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": about}


def called(id: str, name: str, arguments: Any) -> dict:
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
    stop = choice["stop_reason"]
    ended = {"stop_reason": "stop_sequence" if stop else STOPS[choice["finish_reason"]], "stop_sequence": stop}
    return about | {"model": whole["model"], "content": blocks, **ended, "usage": counts}


def message_events(whole: dict, body: dict) -> Iterable[Event]:
    message = to_message(whole, body)
    yield "message_start", {"type": "message_start", "message": message | {"content": []} | dict.fromkeys(ENDED)}
    for index, block in enumerate(message["content"]):
        kind = block["type"]
        given = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}, "tool_use": {"input": {}}}[kind]
        yield "content_block_start", {"type": "content_block_start", "index": index, "content_block": block | given}
        delta = {"type": f"{kind}_delta", kind: block.get(kind)}  # text and thinking stand in fields of that name
        if kind == "tool_use":
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield "content_block_delta", {"type": "content_block_delta", "index": index, "delta": delta}
        yield "content_block_stop", {"type": "content_block_stop", "index": index}
    ended = {name: message[name] for name in ENDED}
    yield "message_delta", {"type": "message_delta", "delta": ended, "usage": message["usage"]}
    yield "message_stop", {"type": "message_stop"}


def anthropic_error(refused: Any) -> dict[str, Any]:
    kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
    kind = kinds.get(refused.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(refused)}}


# ---- OpenAI's /v1/responses, as far as codex needs it

KEEPS = ("previous_response_id", "conversation", "background", "prompt")  # they need what this server does not keep
OF_MODEL = ("model", "stream", "temperature", "top_p", "top_logprobs", "tool_choice")


def from_responses(body: dict) -> dict:
    if kept := [name for name in KEEPS if body.get(name)]:
        raise ValueError(f"{kept[0]} is not supported: each request must have all items in `input`")
    messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    for item in [{"role": "user", "content": given}] if isinstance(given := body["input"], str) else given:
        _add_item(messages, item)
    asked = {name: body[name] for name in OF_MODEL if name in body} | {"messages": messages, "tools": []}
    asked |= {"max_tokens": body.get("max_output_tokens"), "response_format": (body.get("text") or {}).get("format")}
    asked["logprobs"] = "message.output_text.logprobs" in (body.get("include") or ())
    for tool, _ in _functions(body):
        if tool["type"] == "function":
            asked["tools"].append(_function(tool, tool.get("parameters")))
        elif tool["type"].startswith("web_search"):
            asked["web_search"] = True
        else:
            raise ValueError(f"a tool of type {tool['type']!r} is not supported: only function")
    return asked


def _functions(body: dict) -> Iterable[tuple[dict, str | None]]:
    """The tools, each with its namespace."""
    for tool in body.get("tools") or ():
        inside = tool["type"] == "namespace"
        yield from ((each, tool["name"]) for each in tool["tools"]) if inside else [(tool, None)]


def _add_item(messages: list[dict], item: dict) -> None:
    """Append an item. The calls of a turn are items behind its text."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item["role"], "content": item["content"]})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(called(item["call_id"], item["name"], item["arguments"]))
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    elif kind != "reasoning":
        raise ValueError(f"an item of type {kind!r} is not supported")


def to_response(whole: dict, body: dict) -> dict:
    choice, usage, id = whole["choices"][0], whole["usage"], whole["id"].removeprefix("chatcmpl-")
    message, cut = choice["message"], choice["finish_reason"] == "length"
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
    if message["content"] or not message.get("tool_calls"):
        scored = (choice["logprobs"] or {"content": []})["content"]
        part = {"type": "output_text", "text": message["content"] or "", "annotations": [], "logprobs": scored}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    spaces = {tool.get("name"): {"namespace": space} for tool, space in _functions(body) if space}
    for call in message.get("tool_calls", ()):
        named = spaces.get(call["function"]["name"], {})
        items.append({"type": "function_call", "call_id": call["id"], **call["function"], **named})
    status = {"status": "incomplete" if cut else "completed"}
    items = [{"id": f"item_{id}_{place}"} | item | status for place, item in enumerate(items)]
    counts = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    counts |= {"total_tokens": usage["total_tokens"], "output_tokens_details": {"reasoning_tokens": 0}}
    counts |= {"input_tokens_details": usage["prompt_tokens_details"]}
    about = {"id": f"resp_{id}", "object": "response", "created_at": whole["created"], "model": whole["model"]}
    about |= {"error": None, "incomplete_details": {"reason": "max_output_tokens"} if cut else None} | status
    about |= {"parallel_tool_calls": True, "tool_choice": "auto", "tools": body.get("tools") or []}
    return about | {"output": items, "usage": counts}


def response_events(whole: dict, body: dict) -> Iterable[Event]:
    for number, (kind, about) in enumerate(_response_events(to_response(whole, body))):
        yield f"response.{kind}", {"type": f"response.{kind}", "sequence_number": number} | about


def _response_events(response: dict) -> Iterable[tuple[str, dict]]:
    begun = response | {"output": [], "status": "in_progress", "usage": None, "incomplete_details": None}
    yield "created", {"response": begun}
    yield "in_progress", {"response": begun}
    for index, item in enumerate(response["output"]):
        empty = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield "output_item.added", {"output_index": index, "item": item | empty | {"status": "in_progress"}}
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            yield "function_call_arguments.delta", place | {"delta": item["arguments"]}
            yield "function_call_arguments.done", place | {"arguments": item["arguments"]}
        for number, part in enumerate(item.get("content", ())):
            own = place | {"content_index": number} | ({"logprobs": []} if "logprobs" in part else {})
            yield "content_part.added", own | {"part": part | {"text": ""}}
            yield f"{part['type']}.delta", own | {"delta": part["text"]}
            yield f"{part['type']}.done", own | {"text": part["text"]}
            yield "content_part.done", own | {"part": part}
        yield "output_item.done", {"output_index": index, "item": item}
    yield response["status"], {"response": response}


CHAT = Dialect(lambda body: body, lambda whole, body: whole, chat_events, openai_error)
MESSAGES = Dialect(from_messages, to_message, message_events, anthropic_error)
RESPONSES = Dialect(from_responses, to_response, response_events, openai_error)
DIALECTS = {"/v1/chat/completions": CHAT, "/v1/messages": MESSAGES, "/v1/responses": RESPONSES}
