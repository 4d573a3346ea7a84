"""Tokenises rows: prompts for reinforcement learning, demonstrations for the warm start.

Everything is tokenised once, here. A prompt's index is the number of its row in the data set. Epochs and dropped
rows do not change it, so sampling seeds and evaluation records identify problems by it.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_rft.data.adapters.mathematics import answer_text
from megatron_rft.data.fields import Row
from megatron_rft.data.images import ImageReader, Pictures, filled
from megatron_rft.data.rendering import PromptFormat, encode, field_text, question_of, template_fields
from megatron_rft.data.rows import Rows
from megatron_rft.records import Batch, Prompt
from megatron_rft.utils.errors import DataError, did_you_mean
from megatron_rft.utils.plain_text import plain_text


@dataclass(frozen=True)
class PromptSet:
    """The usable prompts of a data set, and the number of unusable rows by reason."""

    prompts: list[Prompt]
    dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """A row's place in messages; it is looked up when a message is formatted."""

    rows: list[Row]
    index: int
    source: str

    @property
    def row(self) -> Row:
        return self.rows[self.index]

    def __str__(self) -> str:
        found = self.rows.place(self.index) if isinstance(self.rows, Rows) else None
        return found or f"{self.source}: row {self.index + 1}"


@dataclass(frozen=True)
class Demonstration:
    """One worked answer to learn: `response_ids` end with the end-of-sequence token."""

    prompt: Prompt
    response_ids: tuple[int, ...]


def prompt_set(rows: list[Row], tokenizer: Any, form: PromptFormat, source: str) -> PromptSet:
    """Prompts with the reference answer of each. `source` names the data set in errors.

    Raises:
        DataError: a field is missing or not text, or no row can be used.
    """
    prompts, dropped = _prompts(rows, tokenizer, form, source)
    answered = [prompt for prompt in prompts if prompt.answer or not form.answered]
    if not answered:
        field = f"the field {form.answer_field!r} (data.answer_field)"
        raise DataError(f"{source}: {field} is empty in every row, and rewards need answers: name another field")
    if len(answered) < len(prompts):
        dropped["empty answer"] = len(prompts) - len(answered)
    return PromptSet(answered, dropped)


def demonstrations(
    rows: list[Row], tokenizer: Any, form: PromptFormat, source: str, max_response_tokens: int
) -> tuple[list[Demonstration], dict[str, int]]:
    """Prompts with the whole text of the answer field as the response to learn, and the number of rows that were left
    out, by reason.

    Raises:
        DataError: a field is missing or no text, or no row can be used.
    """
    (prompts, dropped), end = _prompts(rows, tokenizer, form, source), eos_token_id(tokenizer)
    answered = [prompt for prompt in prompts if rows[prompt.index].get(form.answer_field) not in (None, "")]
    if not answered:
        raise DataError(f"{source}: the field {form.answer_field!r} is empty or missing in every row: nothing to learn")
    if len(answered) < len(prompts):
        dropped["empty answer"] = len(prompts) - len(answered)
    texts = [field_text(rows[each.index], form.answer_field, Place(rows, each.index, source)) for each in answered]
    plain = plain_text(tokenizer)
    encoded = plain.encode([plain.hidden(text) for text in texts])
    examples = [Demonstration(p, (*ids, end)) for p, ids in zip(answered, encoded, strict=True)]
    lengths = [len(each.response_ids) for each in examples]
    _check_lengths(lengths, source, "response", "rollout.max_response_tokens", max_response_tokens)
    kept = [each for each in examples if len(each.response_ids) <= max_response_tokens]
    if len(kept) < len(examples):
        dropped["response too long"] = len(examples) - len(kept)
    return kept, dropped


def as_batch(demonstrations: list[Demonstration]) -> Batch:
    """Demonstrations as the records that objectives read."""
    prompts = [list(each.prompt.token_ids) for each in demonstrations]
    batch = Batch.of(prompts, [list(each.response_ids) for each in demonstrations])
    keys = torch.tensor([each.prompt.images_key for each in demonstrations])
    return batch if demonstrations[0].prompt.images is None else batch.with_sequences(images=keys)


def reference_answer(value: Any) -> str:
    """The reference answer for the verifier. GSM8K's worked answers end with "#### 18"; a float that is whole loses its
    ".0"; a list of one is that one; several values are joined by commas, as they are written in an answer.

    Raises:
        ValueError: it is an object, NaN or infinite.
    """
    if isinstance(value, list | tuple):
        return ", ".join(reference_answer(each) for each in value)
    return "" if value is None else answer_text(value).rpartition("####")[2].strip()


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
    places = [Place(rows, i, source) for i, row in enumerate(rows) if not form.adapted or "unusable" not in row]
    if not places:
        raise DataError(f"{source}: none of its {len(rows)} rows can be used: {', '.join(unusable)}")
    _check_fields(places, form)
    questions = [question_of(place.row, form, place, tokenizer) for place in places]
    images: list[Pictures | None] = [None] * len(questions)
    if form.image_field:
        reader = ImageReader.of(tokenizer, form.image_field, *form.image_pixels)
        images = [reader.read(place.row, place) for place in places]
    texts = [question.rendered(tokenizer, each) for question, each in zip(questions, images, strict=True)]
    chats = [bool(question.chat) for question in questions]
    encoded = encode(texts, tokenizer, chats)
    encoded = [filled(ids, each) for ids, each in zip(encoded, images, strict=True)]
    lengths, shown = [len(ids) for ids in encoded], plain_text(tokenizer).shown
    closes = "</think>" not in plain_text(tokenizer).ids  # a response's text has no control tokens
    opened = [closes and chat and text.rstrip().endswith("<think>") for chat, text in zip(chats, texts, strict=True)]
    _check_lengths(lengths, source, "prompt", "data.max_prompt_tokens", form.max_prompt_tokens)
    prompts = [
        Prompt(
            at.index, tuple(ids), shown(text), _answer(at, form), _rest(at.row, form), shown(asked.text), seen, thinks
        )
        for at, asked, text, ids, seen, thinks in zip(places, questions, texts, encoded, images, opened, strict=True)
        if 0 < len(ids) <= form.max_prompt_tokens
    ]
    reasons = unusable | {
        "prompt too long": sum(length > form.max_prompt_tokens for length in lengths),
        "empty prompt": lengths.count(0),
    }
    if not prompts:
        raise DataError(f"{source}: every prompt is empty; is {form.prompt_field!r} the right data.prompt_field?")
    return prompts, {reason: count for reason, count in reasons.items() if count}


def _answer(place: Place, form: PromptFormat) -> str:
    """An adapter has already extracted the answer, so a "####" in it belongs to the answer."""
    value = place.row.get(form.answer_field)
    if form.adapted:
        return str(value)
    try:
        return reference_answer(value)
    except ValueError as error:
        raise DataError(f"{place}: the field {form.answer_field!r} {error} (data.answer_field)") from None


def _rest(row: Row, form: PromptFormat) -> dict[str, Any]:
    """The other fields; a list of messages is kept for `rendering.ask_again`."""
    left = {form.image_field} | ({form.prompt_field} if not form.has_messages(row) else set())
    return {name: value for name, value in row.items() if name not in left}


def _check_fields(places: list[Place], form: PromptFormat) -> None:
    """Checks that every row has every field that the recipe names. An adapter's may lack a solution to learn."""
    template, wanted = form.template, {} if form.adapted else {form.answer_field: "data.answer_field"}
    named = dict.fromkeys(template_fields(template), "data.prompt_template") if template else {}
    wanted |= named if template else {form.prompt_field: "data.prompt_field"}
    for place, row in ((place, place.row) for place in places):
        for name in [name for name in wanted if name not in row]:
            there = f"it has {', '.join(map(repr, row))}.{did_you_mean(name, row)}"
            way_out = " Where no reward compares with it, name any that has text" if name == form.answer_field else ""
            raise DataError(f"{place} has no field {name!r} ({wanted[name]}); {there}{way_out}")


def _check_lengths(lengths: list[int], source: str, what: str, option: str, limit: int) -> None:
    """Refuses a data set whose prompts are all too long."""
    if min(lengths) > limit:
        raise DataError(
            f"{source}: all {len(lengths)} {what}s are longer than {option}={limit}; the shortest has "
            f"{min(lengths)} tokens, the longest {max(lengths)}: set {option} to at least {min(lengths)}"
        )
