"""Reads the problems of a recipe's data sources and formats them as prompts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_rft.config import Data, Source
from megatron_rft.config.datasets import DATASETS
from megatron_rft.config.environment import AnyEnvironment
from megatron_rft.data.prompts import Demonstration, PromptSet, demonstrations, prompt_set
from megatron_rft.data.rendering import PromptFormat
from megatron_rft.data.rows import Row, load_rows
from megatron_rft.environments.tools import schemas
from megatron_rft.records import Prompt
from megatron_rft.utils.errors import DataError, UserError, did_you_mean


@dataclass(frozen=True)
class Problems:
    """A `part` is "train", "validation", "test", or the name of a benchmark."""

    data: Data
    environment: AnyEnvironment | None = None  # the prompts offer its tools
    benchmarks: dict[str, Source] = field(default_factory=dict)

    def source(self, part: str) -> Source:
        return self.benchmarks.get(part) or getattr(self.data, part)

    def rows(self, part: str) -> list[Row]:
        source = self.source(part)
        with self._named(part):
            chosen = {name: getattr(source, name) for name in ("adapter", "subset", "files", "streaming")}
            chosen["part"] = "test" if part in self.benchmarks else part
            rows = load_rows(source.path, source.split, source.limit or self.data.limit, **chosen)
            column = self.data.image_field
            if column and part == "train" and not self.environment and not any(column in row for row in rows):
                there = f"the first has {', '.join(map(repr, rows[0]))}.{did_you_mean(column, rows[0])}"
                raise DataError(f"no row has the column {column!r} (data.image_field); {there}")
        return rows

    def prompt_format(self, part: str) -> PromptFormat:
        """The format of a part's prompts. An adapter has its own field names and template."""
        data, source = self.data, self.source(part)
        common = {name: getattr(data, name) for name in ("chat", "chat_template_kwargs", "max_prompt_tokens")}
        common["tools"] = schemas(self.environment) if self.environment else ()
        if source.adapter is None:
            prompt, answer = source.prompt_field or data.prompt_field, source.answer_field or data.answer_field
            common |= {"image_field": data.image_field, "image_pixels": (data.min_image_pixels, data.max_image_pixels)}
            return PromptFormat(prompt, answer, source.prompt_template or data.prompt_template, **common)
        known = DATASETS[source.adapter]
        # data.prompt_template ("Solve this math problem ...") does not fit benchmarks of another kind.
        template = None if part in self.benchmarks and known.reward != "math" else data.prompt_template
        return PromptFormat(
            prompt_template=source.prompt_template or template or known.template,
            answered=known.reward not in ("code", "model"),
            adapted=True,
            **common,
        )

    def prompts(self, part: str, tokenizer: Any) -> PromptSet:
        rows = self.rows(part)
        with self._named(part):
            return prompt_set(rows, tokenizer, self.prompt_format(part), self.source(part).path)

    def of_evaluations(self, tokenizer: Any) -> dict[str, list[Prompt]]:
        """The problems of data.validation and data.test, by part."""
        return {p: self.prompts(p, tokenizer).prompts for p in ("validation", "test") if getattr(self.data, p)}

    def demonstrations(self, tokenizer: Any, limit: int) -> tuple[list[Demonstration], dict[str, int]]:
        """The answers of data.train to learn; `limit` is the most tokens of one."""
        rows, form = self.rows("train"), self.prompt_format("train")
        form = replace(form, answer_field="solution") if form.adapted else form
        with self._named("train"):
            return demonstrations(rows, tokenizer, form, self.data.train.path, limit)

    @contextmanager
    def _named(self, part: str) -> Iterator[None]:
        """Put the part's option in front of an error."""
        try:
            yield
        except UserError as error:
            section = "evaluation.benchmarks" if part in self.benchmarks else "data"
            raise type(error)(f"{section}.{part}: {error}") from None
