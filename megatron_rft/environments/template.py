"""The environment's tokens: its text is tokenised once, in its place in the chat template.

The template renders [user, assistant: MARK, messages ...]. What follows MARK are the tokens after a turn, less the
token that the policy ended its turn with. Rendering the new messages alone would lose what the template writes between
two turns (in ChatML a newline), and tokenising the whole conversation again would change the policy's tokens. Messages
are rendered together, because templates join the answers of several tools. What follows MARK begins with a special
token, so its tokens do not depend on the text before it.

A prompt that was not made by the chat template is followed by the plain text.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

from megatron_rft.data.images import Pictures, filled
from megatron_rft.data.rendering import NOW, as_text, described, with_calls
from megatron_rft.environments.base import Message, text_of
from megatron_rft.records import Prompt
from megatron_rft.utils.errors import ConfigError, DataError, first_line
from megatron_rft.utils.plain_text import plain_text

MARK = "MARK7391"
THOUGHT = "<think>\nhm\n</think>\n\n5"
ASKED, ANSWERED = {"role": "user", "content": "u"}, {"role": "assistant", "content": MARK}
TEMPLATE = "the tokenizer's chat template"


@dataclass(frozen=True)
class Template:
    """`variables`: those of the recipe (data.chat_template_kwargs). `stops`: tokens that end a turn. The tokens that it
    returns have one for each image: `filled` makes them as many as its features."""

    tokenizer: Any
    stops: tuple[int, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    lock: Any = field(default_factory=Lock)  # a fast tokenizer does not allow every use by two threads

    def applies(self, prompt: Prompt) -> bool:
        """Whether the chat template made the prompt."""
        return self.tokenizer.chat_template is not None and prompt.text.endswith(self._to_answer)

    def after_turn(self, prompt: Prompt, said: str | list[Message], last: int) -> list[int]:
        """The tokens between a turn that ended with the token `last` and the next one. If `last` is another stop token
        than the template's, the template's follows it."""
        with self.lock:
            return self._between(said, last, self.applies(prompt))

    def conversation(self, said: list[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        """The tokens of a whole conversation up to where the policy writes. A template that knows no tools has their
        descriptions in the system's message, and one that knows no calls has them as text."""
        with self.lock:
            said, tools, template = self._hidden(said), self._hidden(tools), str(self.tokenizer.chat_template)
            if tools and not re.search(r"\btools\b", template):
                said, tools = described(said, tools), None
            if not re.search(r"\btool_calls\b", template):
                said = [with_calls(message) for message in said]
            if self.tokenizer.chat_template is None:
                return plain_text(self.tokenizer).encode([as_text(said)], add_special_tokens=True)[0]
            return self._encoded(self._rendered(said, generate=True, tools=tools))

    def between(self, said: list[Message], last: int) -> list[int]:
        """The tokens between a turn of such a conversation and the next one."""
        with self.lock:
            return self._between(said, last, self.tokenizer.chat_template is not None)

    def _between(self, said: str | list[Message], last: int, applies: bool) -> list[int]:
        if not applies:
            return self._encoded(self._hidden(plain(said)))
        ids = self._after(self._hidden(messages(said)))
        return ids[1:] if ids[0] == last else ids

    def opened(self, prompt: Prompt, said: str | list[Message], images: Pictures | None = None) -> tuple[int, ...]:
        """The prompt's tokens with messages after the problem, which show `images`."""
        with self.lock:
            if not self.applies(prompt):
                return (*prompt.token_ids, *filled(self._encoded(self._hidden(plain(said))), images))
            end = self._encoded(self._to_answer)
            if list(prompt.token_ids[-len(end) :]) != end:
                raise DataError(f"problem {prompt.index}: its prompt does not end with the tokens of {TEMPLATE}'s end")
            rest = self._rest([{"role": "user", "content": MARK}, *self._hidden(messages(said))])
            return (*prompt.token_ids[: -len(end)], *filled(self._encoded(rest), images))

    def check(self, role: str) -> list[str]:
        """Check, before anything is generated, that the template can show messages of `role` between turns. Returns
        notes for the log.

        Raises:
            ConfigError: it cannot; or turns do not end where the template ends them.
        """
        if self.tokenizer.chat_template is None:
            return []
        said = {"role": role, "content": "t"} | ({"name": "f"} if role == "tool" else {})
        try:
            first = self._after([said])[0]
            answer = self._encoded(self._rendered([ASKED, ANSWERED]).partition(MARK)[2])
        except DataError as error:
            raise ConfigError(f"environment: {error}; set model.tokenizer to one whose template takes it") from None
        ends = [first] if role == "tool" else [*answer[:1], first]  # gpt-oss ends a last answer by a token of its own
        if not {*ends} & {*self.stops}:
            end = self.tokenizer.decode(ends[:1])
            raise ConfigError(
                f"rollout.stop: {TEMPLATE} ends a turn with {end!r}, and responses do not end there: add it to "
                "rollout.stop"
            )
        with suppress(DataError):
            kept = self._rendered([ASKED, {"role": "assistant", "content": THOUGHT}, said])
            if kept.startswith(self._rendered([ASKED], generate=True) + THOUGHT):
                return []
        return [
            f"{TEMPLATE} shows an earlier turn otherwise than it was written when a message of role {role} follows it "
            "(it drops thinking or adds to it): episodes keep every token as it was sampled"
        ]

    def _after(self, said: list[Message]) -> list[int]:
        """The tokens behind a turn of the policy that messages follow. Some templates (gpt-oss's, MiniMax's) show a
        tool's answer only behind a call: there the turn is one."""
        try:
            return self._encoded(self._rest([ASKED, ANSWERED, *said]))
        except DataError:
            name = said[0].get("name") if said else None
            call = {"type": "function", "function": {"name": name, "arguments": {MARK: 0}}}
            special = {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}
            with suppress(DataError, StopIteration):
                ids = self._encoded(self._rest([ASKED, {"role": "assistant", "tool_calls": [call]}, *said]))
                ends = special.intersection(ids, self.stops) or special
                return ids[next(place for place, token in enumerate(ids) if token in ends) :]
            raise

    @cached_property
    def _to_answer(self) -> str:
        """What the template writes between a question and its answer."""
        return self._rest([{"role": "user", "content": MARK}])

    def _rest(self, conversation: list[dict[str, Any]]) -> str:
        parts = self._rendered(conversation, generate=True).split(MARK)
        if len(parts) != 2:
            raise DataError(f"{TEMPLATE} shows a message {len(parts) - 1} times, and it must show it once")
        return parts[1]

    def _rendered(self, conversation: list[dict[str, Any]], generate: bool = False, **more: Any) -> str:
        apply = self.tokenizer.apply_chat_template
        try:
            return apply(conversation, tokenize=False, add_generation_prompt=generate, **NOW, **self.variables, **more)
        except Exception as error:  # a template is a program: it refuses roles by an exception
            roles = ", ".join(each["role"] for each in conversation)
            raise DataError(f"{TEMPLATE} fails on a conversation of {roles} ({first_line(error)})") from None

    def _hidden(self, said: Any) -> Any:
        """Without control tokens: what an environment says is text."""
        return plain_text(self.tokenizer).hidden(said)

    def _encoded(self, text: str) -> list[int]:
        return plain_text(self.tokenizer).encode([text])[0]


def messages(said: str | list[Message]) -> list[Message]:
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


def seen(said: str | list[Message], before: Pictures | None) -> Pictures | None:
    """The images of what is said, if there are any, as they are now: an environment may write the next one to the same
    file. `before`: the episode's so far, which have their reader; None: its model reads no images. Raises DataError."""
    parts = [part for each in messages(said) if isinstance(each["content"], list) for part in each["content"]]
    if not (images := [part["image"] for part in parts if "image" in part]):
        return None
    if before is None:
        raise DataError("a message has an image: set data.image_field, a column that rows may lack")
    return before.reader.pictures(images, "", "a message", now=True)


def plain(said: str | list[Message]) -> str:
    return "\n".join(text_of(message["content"]) for message in messages(said))
