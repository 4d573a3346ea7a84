"""A turn of the policy as a message of the chat API: its text, reasoning and calls of tools."""

import json
import re
from dataclasses import dataclass, replace
from typing import Any

from megatron_rft.environments.dialects import called
from megatron_rft.records import Response
from megatron_rft.rewards.tools.calls import MARKERS, Call, tool_calls

THOUGHT, END_OF_THOUGHT = "<think>", "</think>"
# Of gpt-oss: whom a part is for, where it is (with whom it is for, if that is there), and its text.
CHANNEL = re.compile(r"([^>]*)<\|channel\|>(.*?)<\|message\|>(.*?)(?=<\|(?:end|return|call|start)\|>|\Z)", re.DOTALL)
LAST = 16  # tokens of a prompt, which have the beginning of a thought that the template has opened


@dataclass(frozen=True)
class Spoken:
    """`stops`: tokens that end a turn."""

    tokenizer: Any
    stops: tuple[int, ...]

    def message(self, prompt: Any, sampled: Response, tools: Any, stop: list[str], id: str) -> tuple[dict, Response]:
        """The message, and the turn, which ends with the token that completes one of the texts `stop`. What follows an
        opened thought that is not closed is no answer, and no calls."""
        sampled = self._cut(sampled, stop)
        ids = list(sampled.token_ids)
        text = _before(stop, self._decode(ids))
        thought, ended, said = text.rpartition(END_OF_THOUGHT)
        spelt = self._decode(ids, special=True)  # some models mark calls with special tokens
        # the pattern takes quadratic time in a text without channels
        if parts := CHANNEL.findall(_before(stop, spelt)) if "<|channel|>" in spelt else []:
            thought = ended = "\n".join(part for _, channel, part in parts if channel == "analysis")
            said = "".join(part for to, channel, part in parts if channel != "analysis" and "to=" not in to + channel)
            spelt = "".join(f"{to} {channel}{part}" for to, channel, part in parts if "to=" in to + channel)
        opened = text.startswith(THOUGHT) or self.tokenizer.decode(prompt[-LAST:]).rstrip().endswith(THOUGHT)
        if opened and not ended:
            thought, said, tools = text, "", None
        message: dict[str, Any] = {"role": "assistant", "content": said.lstrip("\n") if ended else said}
        if thought:
            message["reasoning_content"] = thought.removeprefix(THOUGHT).strip()
        if calls := self._calls(spelt, tools):
            marker = MARKERS.search(message["content"])
            before = message["content"][: marker.start() if marker else 0].rstrip("[{ \t\n")  # of JSON without a tag
            message["content"] = before.removesuffix("```json").removesuffix("```").strip() or None
            given = [(call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in calls]
            message["tool_calls"] = [called(f"call_{id}_{number}", *each) for number, each in enumerate(given)]
        return message, sampled

    def completed(self, ids: list[int], stop: list[str]) -> str | None:
        """The text of `stop` that these tokens have first."""
        return _first(stop, self._decode(ids)) if stop else None

    def _decode(self, ids: list[int], special: bool = False) -> str:
        ids = ids[:-1] if ids and ids[-1] in self.stops else ids
        return self.tokenizer.decode(ids, skip_special_tokens=not special)

    def _calls(self, spelt: str, tools: Any) -> list[Call]:
        """A text that looks like calls of other functions is a text."""
        described = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools or ()}
        if not described:
            return []
        try:
            properties = {name: schema.get("properties") or {} for name, schema in described.items()}
            calls = tool_calls(spelt, properties)
        except Exception:  # also where a tool is described otherwise than any standard has it
            return []
        return calls if any(call.name in described for call in calls) else []

    def _cut(self, sampled: Response, stop: list[str]) -> Response:
        ids = list(sampled.token_ids)
        if self.completed(ids, stop) is None:
            return sampled
        length = next(n for n in range(1, len(ids) + 1) if self.completed(ids[:n], stop))
        routes = None if sampled.routes is None else sampled.routes[: len(sampled.routes) - (len(ids) - length)]
        parts = {"token_ids": tuple(ids[:length]), "logprobs": tuple(sampled.logprobs[:length])}
        return replace(sampled, **parts, supports=sampled.supports[:length], finish_reason="stop", routes=routes)


def _first(stop: list[str], text: str) -> str | None:
    return min((each for each in stop if each in text), key=text.find, default=None)


def _before(stop: list[str], text: str) -> str:
    return text if (first := _first(stop, text)) is None else text[: text.find(first)]
