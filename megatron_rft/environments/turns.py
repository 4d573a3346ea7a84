"""The exact tokens of a program's episode, whose turns come as chat requests: a tree of turns, and its segments.

The tokens of a turn are its parent's, then `between` (rendered), then those that were sampled, which are never
tokenised again. A request whose messages extend those of a known turn continues its tokens; any other one (the first,
of a sub-agent, with a compacted or edited history, with other tools) begins a new root.
"""

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megatron_rft.data.fields import besides_text
from megatron_rft.environments.base import Message, content_of, text_of
from megatron_rft.responses import Response


@dataclass(eq=False)
class PolicyTurn:
    """One turn of the policy. `number`: in the order of sampling."""

    parent: "PolicyTurn | None"
    between: tuple[int, ...]  # of a root: the whole prompt
    said: str  # the new messages
    sampled: Response
    number: int
    images: Any = None  # data.images.Pictures of `tokens`, if there are any

    def __post_init__(self):
        """`tokens`: all tokens up to the end of the turn."""
        before = self.parent.tokens if self.parent else ()
        self.tokens: tuple[int, ...] = (*before, *self.between, *self.sampled.token_ids)


@dataclass
class Tree:
    """`known`: the key of a turn's messages, its own with them -> the last such turn."""

    turns: list[PolicyTurn] = field(default_factory=list)
    known: dict[str, PolicyTurn] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)  # of each segment of the last `response`

    def place(self, messages: list[Message], tools: Any) -> tuple[PolicyTurn | None, list[Message]]:
        """The turn that messages continue, or None, and the messages behind it. It wrote the last message of the
        assistant; an unknown one is an edited history."""
        found = keys(messages, tools)
        for place in range(len(messages), 0, -1):
            if messages[place - 1]["role"] == "assistant":
                turn = self.known.get(found[place - 1]) if place < len(messages) else None
                return turn, messages[place:] if turn else messages
        return None, messages

    def add(self, turn: PolicyTurn, messages: list[Message], answer: Message, tools: Any) -> None:
        """Messages of the system at the end of a request may be gone from the next one: some programs tell their state
        there. The turn is then continued as well, and its tokens keep them. Of equal turns the last one counts."""
        self.turns.append(turn)
        lasting = list(messages)
        while len(lasting) > 1 and lasting[-1]["role"] == "system":
            lasting.pop()
        for history in [messages, lasting] if len(lasting) < len(messages) else [messages]:
            key = keys([*history, plain(answer)], tools)[-1]
            self.known[key] = max(turn, self.known.get(key, turn), key=lambda each: each.number)

    def response(self, own: tuple[int, ...]) -> Response:
        """The episode. The first turn that continues another one stays in its segment, and any further one begins a
        segment of its own, whose prompt has the tokens before it: each sampled token is in one turn of one segment.
        `own`: the tokens of the problem's prompt."""
        turns = sorted(self.turns, key=lambda turn: turn.number)
        ends: dict[PolicyTurn, list[PolicyTurn]] = {}  # the last turn of a segment so far -> its turns
        for turn in turns:
            ends[turn] = [*(ends.pop(turn.parent, []) if turn.parent else []), turn]
        self.images = [turns[-1].images for turns in sorted(ends.values(), key=lambda each: each[0].number)]
        segments = [_segment(each) for each in sorted(ends.values(), key=lambda each: each[-1].number)]
        last = replace(segments[-1], segments=tuple(segments[:-1]))
        if not last.segments:
            return replace(last, order=(), prompt_ids=None if last.prompt_ids == own else last.prompt_ids)
        return replace(last, segments=tuple(sorted(last.segments, key=lambda each: each.order[0])))


def _segment(turns: list[PolicyTurn]) -> Response:
    first, last = turns[0], turns[-1]
    length = len(first.tokens) - len(first.sampled.token_ids)  # of the prompt
    logprobs, supports, spans, routes = [], [], [], None
    for turn in turns:
        ids = turn.sampled.token_ids
        given = [0.0] * len(turn.between) if turn is not first else []
        logprobs += [*given, *turn.sampled.logprobs]
        supports += [*[() for _ in given], *turn.sampled.supports] if turn.sampled.supports else []
        spans.append((len(turn.tokens) - length - len(ids), len(turn.tokens) - length, 0.0))
        if (read := turn.sampled.routes) is not None:  # the engine has read earlier turns again: who wrote them counts
            routes = read if routes is None else np.concatenate([routes, read[len(routes) :]])
    own = {"logprobs": tuple(logprobs), "supports": tuple(supports), "routes": routes, "turns": tuple(spans)}
    own |= {"said": tuple(turn.said for turn in turns if turn.said), "order": tuple(turn.number for turn in turns)}
    known = {"finish_reason": last.sampled.finish_reason, "weight_version": first.sampled.weight_version}
    return Response(last.tokens[length:], prompt_ids=first.tokens[:length], **known, **own)


def plain(message: dict[str, Any]) -> Message:
    """A message as a chat template takes it: a text or parts, and calls whose arguments are objects. Raises ValueError
    for something else than text and images."""
    role = "system" if message["role"] == "developer" else message["role"]
    kept: dict[str, Any] = {"role": role, "content": content_of(message.get("content"))}
    if not all(part.get("image", "data:").startswith("data:") for part in kept["content"] if isinstance(part, dict)):
        raise ValueError("an image of a request is a data URL: data:image/png;base64,...")
    return kept | besides_text(message)


def named(messages: list[Message]) -> list[Message]:
    """Messages whose results of tools have the name of what was called: some templates show it."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    return [{"name": names[id]} | each if (id := each.get("tool_call_id", "")) in names else each for each in messages]


def keys(messages: list[Message], tools: Any) -> list[str]:
    """After each message a digest of the tools and all messages so far. What programs change when they send an answer
    back does not count: white space around it, the spelling of arguments, ids of calls, reasoning, names."""
    state, found = hashlib.blake2b(json.dumps(tools or [], sort_keys=True).encode(), digest_size=16), []
    for message in messages:
        content = text_of(message["content"]).strip() if message["role"] == "assistant" else message["content"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        state.update(json.dumps([message["role"], content, calls], sort_keys=True).encode())
        found.append(state.hexdigest())
    return found
