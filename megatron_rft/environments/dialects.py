"""The forms of requests and answers: OpenAI's chat completions, which the endpoint speaks, and what becomes of it."""

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


CHAT = Dialect(lambda body: body, lambda whole, body: whole, chat_events, openai_error)
DIALECTS = {"/v1/chat/completions": CHAT}
