"""Text from outside (rows, environments, programs) never becomes a control token of the tokenizer.

A control token, such as <|im_end|>, is one that the tokenizer declares special. Text is `hidden` before a template is
filled with it: a mark stands for each spelling of a control token. What `encode` then finds spelled out is the
template's own, and what a mark stands for is encoded as ordinary text.
"""

import copy
import re
from functools import cached_property, lru_cache
from typing import Any

from megatron_rft.utils.errors import DataError

MARK = "\U000f7391"  # of a plane for private use; followed by a character that says which


class PlainText:
    """The control tokens of one tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.ids = {str(added): id for id, added in tokenizer.added_tokens_decoder.items() if added.special}
        self.names = sorted(filter(None, self.ids), key=len, reverse=True)
        self.hides = [MARK, *self.names]
        self.pattern = re.compile("|".join(map(re.escape, self.hides)))

    @cached_property
    def plain(self) -> Any:
        """A copy that knows no control tokens. A switch of the same tokenizer would race with other threads."""
        plain = copy.deepcopy(self.tokenizer)
        plain.split_special_tokens = True
        return plain

    def hidden(self, value: Any) -> Any:
        """The value, a text or JSON of texts, with marks in the place of control tokens."""
        if isinstance(value, str):
            return self.pattern.sub(lambda match: MARK + chr(0xF0000 + self.hides.index(match[0])), value)
        if isinstance(value, dict):
            return {self.hidden(name): self.hidden(each) for name, each in value.items()}
        return [self.hidden(each) for each in value] if isinstance(value, list | tuple) else value

    def shown(self, text: str) -> str:
        """The text as it was before it was hidden."""
        return re.sub(f"{MARK}(.)", lambda match: self.hides[ord(match[1]) - 0xF0000], text, flags=re.DOTALL)

    def encode(self, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        """The tokens of texts that were made of hidden ones. `add_special_tokens`: with those that the model expects
        around a text."""
        asked = {"add_special_tokens": add_special_tokens, "return_attention_mask": False}  # a quarter of its time
        encoded = self.tokenizer(texts, **asked)["input_ids"] if texts else []
        for place, text in enumerate(texts):
            if MARK in text:
                before, after = self._around() if add_special_tokens else ([], [])
                encoded[place] = [*before, *self._pieces(text), *after]
        return encoded

    def _pieces(self, text: str) -> list[int]:
        """Between the control tokens that are spelled out everything is text."""
        own = "|".join(map(re.escape, self.names)) or "(?!)"
        found: list[int] = []
        for piece in filter(None, re.split(f"({own})", text)):
            found += [self.ids[piece]] if piece in self.ids else self._ordinary(self.shown(piece))
        return found

    def _ordinary(self, text: str) -> list[int]:
        ids = self.plain.encode(text, add_special_tokens=False)
        if wrong := {*ids} & ({*self.ids.values()} - {self.tokenizer.unk_token_id}):
            name = self.tokenizer.decode([min(wrong)])
            raise DataError(f"this tokenizer cannot encode the text of its control token {name!r} as text")
        return ids

    def _around(self) -> tuple[list[int], list[int]]:
        whole, inner = (self.tokenizer("a", add_special_tokens=added)["input_ids"] for added in (True, False))
        starts = range(len(whole) - len(inner) + 1)
        first = next(start for start in starts if whole[start : start + len(inner)] == inner)
        return whole[:first], whole[first + len(inner) :]


@lru_cache(maxsize=8)
def plain_text(tokenizer: Any) -> PlainText:
    return PlainText(tokenizer)
