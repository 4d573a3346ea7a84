"""Formats a row as the text of a prompt: fields with a template, a conversation with a chat template."""

import json
import re
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rft.config.datasets import TEMPLATES
from megatron_rft.data.fields import Fields, Row, check_scalar, conversation, not_finite
from megatron_rft.data.images import MARK, Pictures, filled, flattened, with_parts
from megatron_rft.records import Prompt
from megatron_rft.utils.errors import DataError, first_line
from megatron_rft.utils.plain_text import plain_text

CHAT_IS_SET = "data.chat is set"
TOOLS = """You can call these functions:
{}

Call one by
<tool_call>
{{"name": "its name", "arguments": {{"name": "value"}}}}
</tool_call>"""
CALL = "<tool_call>\n{}\n</tool_call>"
INDEX = re.compile(r"\[[^\]]*\]")  # in a template: {meta[level]}
# A template that writes the date gets this one: prompts must not differ at a resume, or between ranks at midnight.
NOW = {"strftime_now": date(2026, 1, 1).strftime}


@dataclass(frozen=True)
class PromptFormat:
    """The format of prompts. The fields have the names of a recipe's `data` section."""

    prompt_field: str = "question"
    answer_field: str = "answer"
    prompt_template: str | None = None  # format string, or one's name in TEMPLATES; None: the prompt field as it is
    chat: bool = False  # through the tokenizer's chat template, as the user's turn
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas of functions, which the chat template shows
    max_prompt_tokens: int = 512
    answered: bool = True  # rows need an answer; false where tests or a reward model grade
    image_field: str | None = None  # the column of a prompt's images
    image_pixels: tuple[int | None, int | None] = (None, None)  # the least and most of an image; None: the processor's
    adapted: bool = False  # the rows are an adapter's: they may have a history, or be unusable

    @cached_property
    def template(self) -> str | None:
        return TEMPLATES.get(self.prompt_template, self.prompt_template)

    def has_messages(self, row: Row) -> bool:
        """Whether the prompt is a list of messages: the prompt field is used, and is a list."""
        used = self.template is None or self.prompt_field in template_fields(self.template)
        return used and not self.adapted and isinstance(row.get(self.prompt_field), list)

    def turns(self, row: Row, place: object) -> tuple[list[dict[str, str]], str | None]:
        """The turns before the last, and the last one's text, if the prompt is a list of messages."""
        if not self.has_messages(row):
            return row.get("history", []) if self.adapted else [], None
        messages = row[self.prompt_field]
        try:
            messages = flattened(messages, place) if self.image_field else messages
            return conversation(messages, Fields(row, f"the field {self.prompt_field!r}", Path()))
        except DataError as error:
            raise DataError(f"{place}: {error}") from None
        except (AttributeError, KeyError, TypeError):
            raise DataError(f"{place}: tool_calls are a list of {{'function': {{'name', 'arguments'}}}}") from None


class Question(NamedTuple):
    """A question: the text of the last turn, the turns before it, the reason for using a chat template ("": none is
    used), its row, and its format. In its texts control tokens are hidden (utils/plain_text.py)."""

    text: str
    history: list[dict[str, str]]
    chat: str
    place: object
    form: PromptFormat

    def rendered(self, tokenizer: Any, images: Pictures | None = None) -> str:
        """As the model reads it, with control tokens of the row hidden, and one token for each of the `images`."""
        messages = [*self.history, {"role": "user", "content": self.text}]
        if not self.chat and images:
            raise DataError(f"{self.place}: images need a chat template: set data.chat=true")
        if not self.chat:
            return as_text(messages)
        if tokenizer.chat_template is None:
            where = "" if self.chat == CHAT_IS_SET else f"{self.place}: "
            raise DataError(f"{where}{self.chat}, but the tokenizer has no chat template: use data.prompt_template")
        template, variables = str(tokenizer.chat_template), NOW | dict(self.form.chat_template_kwargs)
        tools = plain_text(tokenizer).hidden(self.form.tools)
        _check_variables(template, tuple(self.form.chat_template_kwargs))
        if tools and re.search(r"\btools\b", template):
            variables["tools"] = tools
        elif tools:
            messages = described(messages, tools)
        if not re.search(r"\btool_calls\b", template):
            messages = [with_calls(message) for message in messages]
        messages = with_parts(messages, len(images.grids), self.place) if images else messages
        try:
            return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
        except Exception as error:  # a template is a program: it refuses turns by an exception, and may have any bug
            raise DataError(
                f"{self.place}: the tokenizer's chat template fails ({first_line(error)}): change the row, or set "
                "model.tokenizer to one whose template takes it"
            ) from None


def described(messages: list[dict[str, str]], tools: list[dict[str, Any]]) -> list[dict[str, str]]:
    """A conversation for a chat template that does not know tools: the system's message describes them."""
    before = [message["content"] for message in messages[:1] if message["role"] == "system"]
    described = "\n\n".join([*before, TOOLS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))])
    return [{"role": "system", "content": described}, *messages[len(before) :]]


def with_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A message for a chat template that does not know calls: they follow its text."""
    calls = [CALL.format(json.dumps(call["function"], ensure_ascii=False)) for call in message.get("tool_calls", ())]
    return message | {"content": "\n".join(filter(None, [message["content"], *calls]))} if calls else message


@lru_cache
def _check_variables(chat_template: str, names: tuple[str, ...]) -> None:
    for name in names:
        if not re.search(rf"\b{re.escape(name)}\b", chat_template):
            raise DataError(f"data.chat_template_kwargs: the tokenizer's chat template does not read {name!r}")


def question_of(row: Row, form: PromptFormat, place: object, tokenizer: Any, text: str | None = None) -> Question:
    """The chat template formats a list of messages, regardless of `form.chat`. `place` is formatted into errors only.
    `text`: of another question instead of the row's own.

    Raises:
        DataError: a field in use is null, NaN, infinite, not text, or has characters that no tokenizer accepts.
    """
    history, last = form.turns(row, place)
    hidden = plain_text(tokenizer).hidden
    if text is not None:
        text = hidden(text)
    else:
        row = row if last is None else row | {form.prompt_field: last}
        used = {form.prompt_field} if form.template is None else template_fields(form.template)
        row = row | {name: hidden(row[name]) for name in used if name in row}
        template, field = form.template, form.prompt_field
        text = field_text(row, field, place) if template is None else _filled(template, row, place)
    why_chat = CHAT_IS_SET if form.chat else "" if last is None else "the prompt is a list of messages"
    return Question(text, hidden(history), why_chat, place, form)


def encode(texts: list[str], tokenizer: Any, chats: list[bool]) -> list[list[int]]:
    """A chat template writes the special tokens; otherwise the tokenizer adds those that the model expects in front.
    What a row has of their spelling is hidden in `texts`, and is text."""
    encoded = []
    for chat, part in groupby(zip(texts, chats, strict=True), key=itemgetter(1)):
        encoded += plain_text(tokenizer).encode([text for text, _ in part], add_special_tokens=not chat)
    return encoded


def ask_again(prompt: Prompt, question: str, tokenizer: Any, form: PromptFormat) -> list[int]:
    """The ids of `prompt`, which was formatted by `form`, with another question instead of its own. The question has
    that of the prompt, whose images it shows."""
    images, own = prompt.images, prompt.question
    if images and own:
        question = own.join(part.replace(MARK, "") for part in question.split(own))  # a response may have marks
    asked = question_of(prompt.fields, form, f"row {prompt.index + 1}", tokenizer, question)
    return filled(encode([asked.rendered(tokenizer, images)], tokenizer, [bool(asked.chat)])[0], images)


def as_text(messages: list[dict[str, str]]) -> str:
    """A conversation for a model without a chat template. Speakers are named where there is more than one user turn."""
    turns = sum(message["role"] != "system" for message in messages)
    speakers = {"user": "User: ", "assistant": "Assistant: "} if turns > 1 else {}
    text = "\n\n".join(speakers.get(message["role"], "") + message["content"] for message in messages)
    return text + "\n\nAssistant:" if speakers else text


def field_text(row: Row, name: str, place: object) -> str:
    """A text or a number, as text."""
    try:
        check_scalar(row[name])
    except ValueError as error:
        raise DataError(f"{place}: the field {name!r} {error}") from None
    return str(row[name])


@lru_cache
def template_fields(template: str) -> set[str]:
    """The fields that a format string reads: {question} and {meta[level]} give question and meta."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise DataError(f"data.prompt_template: {error}; literal braces are written {{{{ and }}}}") from None
    for name in names:
        _check_no_attribute(name)
    return {name.partition("[")[0] for name in names}


def _check_no_attribute(name: str) -> None:
    if "." in INDEX.sub("", name):
        raise DataError(
            f"data.prompt_template: {{{name}}} reads an attribute of a value; an entry of an object is {{field[entry]}}"
        )


class _Formatter(string.Formatter):
    """`str.format` without attributes of the values, and without null, NaN or infinity as text."""

    def get_field(self, field_name, args, kwargs):
        _check_no_attribute(field_name)
        value, first = super().get_field(field_name, args, kwargs)
        if value is None or not_finite(value):
            raise ValueError(f"{field_name!r} is {not_finite(value) or 'null'}")
        return value, first


def _filled(template: str, row: Row, place: object) -> str:
    try:
        return _Formatter().vformat(template, (), row)
    except DataError:
        raise
    except (AttributeError, LookupError, MemoryError, OverflowError, TypeError, ValueError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise DataError(f"{place}: data.prompt_template {template!r} fails: {reason}") from None
