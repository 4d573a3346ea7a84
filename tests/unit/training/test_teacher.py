"""A teacher takes no memory of the device while idle, and its hidden states stay on the rank that computed them."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, LlamaConfig, Qwen3Config

from examples.quickstart import arithmetic
from megatron_rft.config import Batching, Megatron
from megatron_rft.config.plugins import Teaching
from megatron_rft.conversion import hf_shapes
from megatron_rft.megatron import weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import SecondDistribution
from megatron_rft.records import Batch
from megatron_rft.training.teacher import Teachers, by_row, check_tokenizer
from megatron_rft.utils.errors import DataError
from tests.families import SEEING
from tests.shapes import SMALL

STUDENT = Qwen3Config(**SMALL, max_position_embeddings=64, architectures=["Qwen3ForCausalLM"])
WIDTH = 32
TEACHER = LlamaConfig(
    **SMALL | {"hidden_size": WIDTH, "num_hidden_layers": 3},
    max_position_embeddings=64,
    tie_word_embeddings=False,
    architectures=["LlamaForCausalLM"],
)


def test_it_is_empty_while_idle_and_its_states_are_never_reduced(one_rank, tmp_path, monkeypatch):
    lookup = weights.random_tensors(TEACHER, seed=6)
    weights.save_folder(((name, lookup(name)) for name in hf_shapes(TEACHER)), tmp_path / "teacher", TEACHER)
    student = Actor(STUDENT, Megatron(), Batching(), "fp32")
    student.load(weights.random_tensors(STUDENT, seed=0))
    teachers = Teachers(Teaching(teacher=str(tmp_path / "teacher")), {}, student, Megatron(), "fp32")
    ((teacher, kept),) = teachers.teachers
    reduced, plain = [], dist.all_reduce
    monkeypatch.setattr(dist, "all_reduce", lambda t, *args, **options: reduced.append(t) or plain(t, *args, **options))
    batch = Batch.of([[1, 2]] * 2, [[3, 4], [5]])
    names = frozenset({"logprobs", "reverse_kl"})
    assert not any(tensor.numel() for tensor in teacher.tensors())
    found = student.outputs(batch, names, teachers.second(batch, SecondDistribution("distil")))["reverse_kl"]
    assert (found > 0).all() and not any(tensor.numel() for tensor in teacher.tensors())
    assert sum(map(torch.numel, kept)) == sum(lookup(name).numel() for name in hf_shapes(TEACHER))
    assert [tuple(tensor.shape) for tensor in reduced] == [(len(names), 3)]  # values alone


def test_rows_beyond_the_students_vocabulary_are_left_out_whatever_the_names_of_its_family(one_rank, tmp_path):
    """Qwen3-VL's embedding is model.language_model.embed_tokens.weight."""
    config = SEEING["qwen3_vl"]
    lookup = weights.random_tensors(config, seed=6)
    weights.save_folder(((name, lookup(name)) for name in hf_shapes(config)), tmp_path / "teacher", config)
    student = Actor(STUDENT, Megatron(), Batching(), "fp32")
    ((teacher, kept),) = Teachers(Teaching(teacher=str(tmp_path / "teacher")), {}, student, Megatron(), "fp32").teachers
    (embedding,) = (tensor for tensor in kept if tensor.shape == (STUDENT.vocab_size, config.hidden_size))
    assert config.vocab_size > STUDENT.vocab_size
    assert torch.equal(embedding, lookup("model.language_model.embed_tokens.weight")[: STUDENT.vocab_size])


def test_the_rows_name_all_teachers_and_no_others():
    options = Teaching(teacher={"a": "x", "b": "y"})
    rows = {0: {"kind": "a", "text": "t"}, 1: {"kind": "b", "text": "t"}}
    assert by_row(options, "kind", rows.items()) == {0: "a", 1: "b"} and by_row(options, None, rows.items()) == {}
    for field, more, message in (
        ("knid", {}, "data.teacher_field: row 1 of data.train has no field 'knid'; it has kind, text"),
        ("kind", {2: {"text": "t"}}, "data.teacher_field: row 3 of data.train has no field 'kind'; it has text"),
        ("kind", {2: {"kind": "c"}}, "row 3 of data.train has 'c' in 'kind', and the teachers are a, b"),
        ("kind", {1: {"kind": "a"}}, "teacher: b does nothing: no row of data.train names it in 'kind'. Leave it out"),
    ):
        with pytest.raises(DataError, match=message):
            by_row(options, field, (rows | more).items())


def test_a_teacher_without_a_tokenizer_is_not_called_one_with_another(tmp_path):
    """transformers makes an empty tokenizer where there is only a config.json, and all its tokens would be others."""
    model, teacher = tmp_path / "model", tmp_path / "teacher"
    arithmetic.tokenizer().save_pretrained(model)
    TEACHER.save_pretrained(teacher)
    tokenizer = AutoTokenizer.from_pretrained(model)
    with pytest.raises(DataError, match=f"teacher: {teacher} has no tokenizer .* Copy there the model's tokenizer"):
        check_tokenizer(str(teacher), tokenizer, model)
