"""Rows to what models read: tokenised prompts for reinforcement learning, demonstrations for the warm start.

Everything is tokenised once, here. A prompt's index is the number of its row in the data set: stable over epochs and
over what is dropped, so sampling seeds and evaluation records can name problems by it.
"""

import string
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_rft.config.datasets import TEMPLATES
from megatron_rft.data.fields import Row
from megatron_rft.records import Batch, Prompt
from megatron_rft.utils.errors import DataError, did_you_mean


@dataclass(frozen=True)
class PromptFormat:
    """How a row becomes a prompt. The names are those of a recipe's `data` section."""

    prompt_field: str = "question"
    answer_field: str = "answer"
    prompt_template: str | None = None  # format string, or one's name in TEMPLATES; None: the prompt field as it is
    chat: bool = False  # through the tokenizer's chat template, as the user's turn
    max_prompt_tokens: int = 512
    overlong: Literal["drop", "error"] = "drop"
    answered: bool = True  # rows without an answer are of no use; not so where tests or a reward model grade
    adapted: bool = False  # the rows are an adapter's: they may have a history, or be unusable

    @property
    def template(self) -> str | None:
        return TEMPLATES.get(self.prompt_template, self.prompt_template)


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts of a data set, and how many rows are not, by reason."""

    prompts: list[Prompt]
    dropped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Demonstration:
    """One worked answer to learn: `response_ids` end with the end-of-sequence token."""

    prompt: Prompt
    response_ids: tuple[int, ...]


@dataclass(frozen=True)
class DemonstrationSet:
    demonstrations: list[Demonstration]
    dropped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.demonstrations)


def prompt_set(rows: list[Row], tokenizer: Any, form: PromptFormat, source: str) -> PromptSet:
    """Prompts with the reference answer of each. `source` names the data set in errors."""
    prompts, dropped = _prompts(rows, tokenizer, form, source)
    answered = [prompt for prompt in prompts if prompt.answer or not form.answered]
    if not answered:
        raise DataError(f"{source}: the field {form.answer_field!r} is empty in every row; rewards need its answers")
    if len(answered) < len(prompts):
        dropped["empty answer"] = len(prompts) - len(answered)
    return PromptSet(answered, dropped)


def demonstration_set(
    rows: list[Row], tokenizer: Any, form: PromptFormat, source: str, max_response_tokens: int | None = None
) -> DemonstrationSet:
    """Prompts with the whole text of the answer field as the response to learn."""
    prompts, dropped = _prompts(rows, tokenizer, form, source)
    end = eos_token_id(tokenizer)
    texts = [str(rows[prompt.index][form.answer_field]) for prompt in prompts]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    found = [Demonstration(p, (*ids, end)) for p, ids in zip(prompts, encoded, strict=True)]
    if max_response_tokens is None:
        return DemonstrationSet(found, dropped)
    lengths = [len(each.response_ids) for each in found]
    kept = [each for each in found if len(each.response_ids) <= max_response_tokens]
    numbers = [each.prompt.index for each in found]
    limit = ("response", "rollout.max_response_tokens", max_response_tokens)
    _check_lengths(lengths, numbers, *limit, form.overlong, source)
    if len(kept) < len(found):
        dropped["response too long"] = len(found) - len(kept)
    return DemonstrationSet(kept, dropped)


def as_batch(demonstrations: list[Demonstration]) -> Batch:
    """Demonstrations as the records that objectives read."""
    return Batch.of(
        [list(each.prompt.token_ids) for each in demonstrations], [list(each.response_ids) for each in demonstrations]
    )


def reference_answer(value: Any) -> str:
    """What the verifier compares with. GSM8K's worked answers end with "#### 18"; a float that is whole loses its
    ".0"; a list of one is that one; several values are joined by commas, as they are written in an answer."""
    if isinstance(value, list | tuple):
        return ", ".join(reference_answer(each) for each in value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value).rpartition("####")[2].strip()


def check_tokenizer(tokenizer: Any, vocabulary_size: int, model: str) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for. Fewer ids than embeddings is common and fine."""
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocabulary_size:
        raise DataError(
            f"the tokenizer's ids go up to {largest}, but {model} has a vocabulary of {vocabulary_size}: "
            "set model.tokenizer to the one that this model was trained with"
        )
    eos_token_id(tokenizer)


def eos_token_id(tokenizer: Any) -> int:
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token (eos_token): responses could never end")
    return tokenizer.eos_token_id


def _prompts(rows: list[Row], tokenizer: Any, form: PromptFormat, source: str) -> tuple[list[Prompt], dict[str, int]]:
    unusable = Counter(row["unusable"] for row in rows if form.adapted and "unusable" in row)
    indexed = [(index, row) for index, row in enumerate(rows) if not form.adapted or "unusable" not in row]
    if not indexed:
        raise DataError(f"{source}: none of its {len(rows)} rows can be used: {', '.join(unusable)}")
    _check_fields(indexed, form, source)
    questions = [_question(row, form, source) for _, row in indexed]
    histories = [row.get("history", ()) if form.adapted else () for _, row in indexed]
    texts = [_text(q, h, tokenizer, form.chat) for q, h in zip(questions, histories, strict=True)]
    encoded = _encode(texts, tokenizer, form.chat)
    lengths = [len(ids) for ids in encoded]
    limit = ("prompt", "data.max_prompt_tokens", form.max_prompt_tokens)
    _check_lengths(lengths, [index for index, _ in indexed], *limit, form.overlong, source)
    prompts = [
        Prompt(index, tuple(ids), text, _answer(row, form), _rest(row, form), question)
        for (index, row), text, ids, question in zip(indexed, texts, encoded, questions, strict=True)
        if 0 < len(ids) <= form.max_prompt_tokens
    ]
    reasons = unusable | {
        "prompt too long": sum(length > form.max_prompt_tokens for length in lengths),
        "empty prompt": lengths.count(0),
    }
    if not prompts:
        raise DataError(f"{source}: every prompt is empty; is {form.prompt_field!r} the right data.prompt_field?")
    return prompts, {reason: count for reason, count in reasons.items() if count}


def _answer(row: Row, form: PromptFormat) -> str:
    """An adapter has taken it out of its working already: a "####" in what is left is the answer's own."""
    return str(row[form.answer_field]) if form.adapted else reference_answer(row[form.answer_field])


def _rest(row: Row, form: PromptFormat) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != form.prompt_field}


def _template_fields(template: str) -> set[str]:
    """The fields that a format string reads: {question} and {meta[level]} give question and meta."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise DataError(f"data.prompt_template: {error}; literal braces are written {{{{ and }}}}") from None
    return {name.partition("[")[0].partition(".")[0] for name in names}


def _check_fields(rows: list[tuple[int, Row]], form: PromptFormat, source: str) -> None:
    """Every field that the recipe names, in every row."""
    template = form.template
    wanted = {form.answer_field: "data.answer_field"}
    wanted |= {name: "data.prompt_template" for name in _template_fields(template)} if template else {}
    wanted |= {} if template else {form.prompt_field: "data.prompt_field"}
    for index, row in rows:
        for name, option in wanted.items():
            if name not in row:
                raise DataError(
                    f"{source}: row {index + 1} has no field {name!r} ({option}); it has {', '.join(map(repr, row))}."
                    f"{did_you_mean(name, row)}"
                )


def _question(row: Row, form: PromptFormat, source: str) -> str:
    """What is asked: the last turn of the conversation, or all of it."""
    if form.template is None:
        return str(row[form.prompt_field])
    try:
        return form.template.format(**row)
    except (AttributeError, KeyError, IndexError, ValueError, TypeError) as error:
        raise DataError(f"{source}: data.prompt_template {form.template!r} fails: {error!r}") from None


def _text(question: str, history: list[dict[str, str]], tokenizer: Any, chat: bool) -> str:
    """As the model reads it: with `chat`, through the tokenizer's chat template."""
    messages = [*history, {"role": "user", "content": question}]
    if not chat:
        return as_text(messages)
    if tokenizer.chat_template is None:
        raise DataError("data.chat is set, but the tokenizer has no chat template: use data.prompt_template")
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _encode(texts: list[str], tokenizer: Any, chat: bool) -> list[list[int]]:
    """A chat template writes its own special tokens; elsewhere the tokenizer adds what its model expects in front."""
    return tokenizer(texts, add_special_tokens=not chat)["input_ids"]


def ask_again(prompt: Prompt, question: str, tokenizer: Any, form: PromptFormat) -> list[int]:
    """The ids of `prompt`, which `form` made, with another question in the place of its own."""
    history = prompt.fields.get("history", ()) if form.adapted else ()
    return _encode([_text(question, history, tokenizer, form.chat)], tokenizer, form.chat)[0]


def as_text(messages: list[dict[str, str]]) -> str:
    """A conversation for a model without a chat template. Speakers are named where there is more than one user turn."""
    turns = sum(message["role"] != "system" for message in messages)
    speakers = {"user": "User: ", "assistant": "Assistant: "} if turns > 1 else {}
    text = "\n\n".join(speakers.get(message["role"], "") + message["content"] for message in messages)
    return text + "\n\nAssistant:" if speakers else text


def _check_lengths(
    lengths: list[int], rows: list[int], what: str, option: str, limit: int, overlong: str, source: str
) -> None:
    """Refuse a data set that is too long as a whole, or in part where `overlong` says so. `rows` count from 0."""
    long = sum(length > limit for length in lengths)
    if long == len(lengths):
        raise DataError(
            f"{source}: all {len(lengths)} {what}s are longer than {option}={limit}; the shortest has "
            f"{min(lengths)} tokens, the longest {max(lengths)}: set {option} to at least {min(lengths)}"
        )
    if long and overlong == "error":
        first = next(row for row, length in zip(rows, lengths, strict=True) if length > limit)
        raise DataError(
            f"{source}: {long} of {len(lengths)} {what}s are longer than {option}={limit}, first that of row "
            f"{first + 1} (longest: {max(lengths)}): raise it, or leave them out with data.overlong=drop"
        )
