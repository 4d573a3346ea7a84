"""The teachers of a distillation: frozen models of any width, depth and family, with the student's tokenizer.

Their weights wait in host memory, and their hidden states are computed in the trainer's layout, each data-parallel rank
its own share. Rows of a vocabulary beyond the student's, which no token has, are left out.
"""

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rft.config import Megatron
from megatron_rft.config.plugins import Teaching
from megatron_rft.conversion import load_config
from megatron_rft.conversion.folder import read_tokenizer, tokenizer_fingerprint
from megatron_rft.data.hub import model_folder
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.two_distributions import Second
from megatron_rft.objectives.base import SecondDistribution
from megatron_rft.records import Batch
from megatron_rft.utils.errors import DataError
from megatron_rft.utils.files import read_json

PREPROCESSOR = "preprocessor_config.json"
PIXELS = ("patch_size", "merge_size", "temporal_patch_size", "image_mean", "image_std", "rescale_factor")
VOCABULARY = ("embed_tokens.weight", "lm_head.weight")  # ends of names: families have different prefixes


class Teachers:
    """The teacher of each sequence: the only one, or that of the sequence's row in data.train."""

    def __init__(self, options: Teaching, of_row: dict[int, str], *shared: Any):
        """`of_row`: row -> name, without rows if there is one teacher. `shared`: as of `load_teacher`."""
        self.teachers = [load_teacher(path, *shared) for path in options.teachers.values()]
        self.actors = [actor for actor, _ in self.teachers]
        numbers = {name: number for number, name in enumerate(options.teachers)}
        self.of_row = {row: numbers[name] for row, name in of_row.items()}

    def second(self, batch: Batch, other: SecondDistribution) -> Second:
        """The teachers' distributions over the response tokens of `batch`."""
        seconds = [Second(batch, kept, mixture=other.mixture, actor=actor) for actor, kept in self.teachers]
        if not self.of_row:
            return seconds[0]
        rows = batch.sequences.get("prompt_index", batch.groups)  # a store's groups are its problems
        number = torch.tensor([self.of_row[row] for row in rows.tolist()])
        parts = [replace(second, only=number == i) for i, second in enumerate(seconds)]
        return Second(batch, parts=tuple(part for part in parts if part.only.any()))


def by_row(options: Teaching, field: str | None, rows: Iterable[tuple[int, dict[str, Any]]]) -> dict[int, str]:
    """Return the teacher's name of each row of data.train, {} if there is one teacher. `rows`: their other fields."""
    teacher_of = {}
    for row, fields in rows if field else ():
        where = f"data.teacher_field: row {row + 1} of data.train has"
        if field not in fields:
            raise DataError(f"{where} no field {field!r}; it has {', '.join(fields)}")
        if (name := str(fields[field])) not in options.teachers:
            raise DataError(f"{where} {name!r} in {field!r}, and the teachers are {', '.join(options.teachers)}")
        teacher_of[row] = name
    if field and (idle := options.teachers.keys() - set(teacher_of.values())):
        raise DataError(f"teacher: {min(idle)} does nothing: no row of data.train names it in {field!r}. Leave it out")
    return teacher_of


def load_teacher(path: str, student: Actor, megatron: Megatron, precision: str) -> tuple[Actor, list[Tensor]]:
    """The model in `path` without its weights, and these in host memory."""
    folder, rows = model_folder(path, "teacher"), student.hf_config.vocab_size
    own = load_config(folder)
    if own.vocab_size < rows:
        raise DataError(f"teacher: {path} has {own.vocab_size} rows in its vocabulary, and the model {rows}")
    if own.vocab_size > rows and parallel.rank() == 0:
        beyond = f"rows {rows} to {own.vocab_size - 1} of its vocabulary, which the model does not have"
        print(f"teacher: {beyond}, are left out", flush=True)
    cut = copy.deepcopy(own)
    cut.vocab_size = rows
    actor = Actor(cut, megatron, student.batching, precision, temperature=student.temperature)
    lookup = weights.open_folder(folder, own)
    actor.load(lambda name: lookup(name)[:rows] if name.endswith(VOCABULARY) else lookup(name))
    kept = actor.snapshot()
    for tensor in actor.tensors():
        tensor.data = tensor.data.new_empty(0)
    return actor, kept


def check_images(teaching: Teaching | None, model: Path) -> None:
    """Check that the teachers get the same pixels of an image as the model in the folder `model`."""
    own = read_json(model / PREPROCESSOR) or {}
    for path in teaching.teachers.values() if teaching else ():
        its = read_json(model_folder(path, "teacher") / PREPROCESSOR) or {}
        if found := [name for name in PIXELS if its.get(name) != own.get(name)]:
            raise DataError(f"teacher: {path} reads images otherwise than the model: {found[0]} in its {PREPROCESSOR}")


def check_tokenizer(path: str, tokenizer: Any, folder: Path) -> None:
    """Check, before a model is built, that the teacher's tokenizer is `tokenizer`, that of the model in `folder`."""
    theirs = model_folder(path, "teacher")
    if tokenizer_fingerprint(theirs) == tokenizer_fingerprint(folder):
        return
    other = read_tokenizer(theirs, "teacher", "Copy there the model's tokenizer, if the teacher has the same")
    for number in range(max(len(tokenizer), len(other))):
        mine, its = tokenizer.convert_ids_to_tokens(number), other.convert_ids_to_tokens(number)
        if mine != its:
            raise DataError(
                f"teacher: {path} has another tokenizer than the model: token {number} is {its!r} there and "
                f"{mine!r} here"
            )
