"""The teacher of a distillation: a frozen model of any width, depth and family, with the student's tokenizer.

Its weights wait in host memory, and its hidden states are computed in the trainer's layout, each data-parallel rank its
own share. Rows of its vocabulary beyond the student's, which no token has, are left out.
"""

import copy
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from megatron_rft.config import Batching, Megatron
from megatron_rft.config.plugins import Teaching
from megatron_rft.conversion import load_config
from megatron_rft.conversion.folder import tokenizer_fingerprint
from megatron_rft.data.hub import model_folder
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.two_distributions import Second
from megatron_rft.records import Batch
from megatron_rft.utils.errors import DataError

VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


class Teacher:
    def __init__(
        self,
        options: Teaching,
        student: Any,
        megatron: Megatron,
        batching: Batching,
        precision: str,
        temperature: float = 1.0,
    ):
        """`student`: the transformers configuration of the model to train."""
        folder = model_folder(options.teacher, "teacher")
        own = load_config(folder)
        if own.vocab_size < student.vocab_size:
            raise DataError(
                f"teacher: the vocabulary of {options.teacher} has {own.vocab_size} rows, fewer than the model's "
                f"{student.vocab_size}"
            )
        if own.vocab_size > student.vocab_size and parallel.rank() == 0:
            rows = f"rows {student.vocab_size} to {own.vocab_size - 1} of its vocabulary, which the model does not have"
            print(f"teacher: {rows}, are left out", flush=True)
        cut = copy.deepcopy(own)
        cut.vocab_size = student.vocab_size
        self.actor = Actor(cut, megatron, batching, precision, temperature=temperature)
        lookup = weights.open_folder(folder, own)
        self.actor.load(lambda name: lookup(name)[: cut.vocab_size] if name in VOCABULARY else lookup(name))
        self.weights: list[Tensor] = self.actor.snapshot()
        for tensor in self.actor.tensors():
            tensor.data = tensor.data.new_empty(0)

    def second(self, batch: Batch, mixture: float) -> Second:
        """The teacher's distribution over the response tokens of `batch`."""
        return Second(batch, self.weights, mixture=mixture, actor=self.actor)


def check_tokenizer(options: Teaching, tokenizer: Any, folder: Path) -> None:
    """Check, before a model is built, that the teacher's tokenizer is `tokenizer`, that of the model in `folder`."""
    theirs = model_folder(options.teacher, "teacher")
    if tokenizer_fingerprint(theirs) == tokenizer_fingerprint(folder):
        return
    try:
        other = AutoTokenizer.from_pretrained(theirs)
    except (OSError, ValueError) as error:
        raise DataError(f"teacher: no tokenizer can be loaded from {theirs}: {error}") from None
    for number in range(max(len(tokenizer), len(other))):
        mine, its = tokenizer.convert_ids_to_tokens(number), other.convert_ids_to_tokens(number)
        if mine != its:
            raise DataError(
                f"teacher: {options.teacher} has another tokenizer than the model: token {number} is {its!r} there and "
                f"{mine!r} here"
            )
