"""Loading, streaming and saving on one rank; tests/parity has layouts over several ranks."""

import subprocess

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3MoeConfig

from megatron_rft.config.sections import Megatron
from megatron_rft.conversion import Mapping, hf_shapes
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, weights
from megatron_rft.utils.errors import RunFailed
from tests.shapes import SMALL

DENSE = Qwen3Config(**SMALL, tie_word_embeddings=True)
MIXTURE = Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=6)


@pytest.fixture(autouse=True)
def alone():
    parallel.initialize(Megatron())
    yield
    parallel.shutdown()


@pytest.mark.parametrize("hf_config", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_the_stream_gives_back_what_was_loaded(hf_config):
    chunks = models.build(hf_config, Megatron(), "fp32")
    lookup = weights.random_tensors(hf_config, seed=0)
    weights.load(chunks, lookup, Mapping(hf_config))
    streamed = dict(weights.WeightStream(chunks, Mapping(hf_config)))
    assert set(streamed) == set(hf_shapes(hf_config))
    assert all(torch.equal(tensor, lookup(name)) for name, tensor in streamed.items())


def test_random_tensors_depend_on_seed_and_name_only():
    one, again, other = (weights.random_tensors(DENSE, seed) for seed in (0, 0, 1))
    gate, up = (f"model.layers.0.mlp.{x}_proj.weight" for x in ("gate", "up"))
    assert torch.equal(one(gate), again(gate))
    assert not torch.equal(one(gate), other(gate)) and not torch.equal(one(gate), one(up))
    assert one(gate).std() == pytest.approx(DENSE.initializer_range, rel=0.2)
    assert one("model.norm.weight").tolist() == [1.0] * 16


def test_experts_are_numbered_over_the_whole_model():
    local = "decoder.layers.2.mlp.experts.local_experts.1.linear_fc2.weight"
    assert weights._renumbered(local, 7, 4) == "decoder.layers.7.mlp.experts.local_experts.5.linear_fc2.weight"
    assert weights._renumbered("decoder.layers.2.mlp.router.weight", 7, 4) == "decoder.layers.7.mlp.router.weight"


def test_transformer_engines_experts_have_the_names_of_local_ones():
    grouped = "decoder.layers.2.mlp.experts.linear_fc1.weight13"
    local = "decoder.layers.2.mlp.experts.local_experts.13.linear_fc1.weight"
    assert [weights.GROUPED.sub(weights.LOCAL, name) for name in (grouped, local)] == [local, local]


def test_a_missing_tensor_is_not_passed_over():
    chunks = models.build(DENSE, Megatron(), "fp32")
    with pytest.raises(KeyError):
        weights.load(chunks, {}.__getitem__, Mapping(DENSE))


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("a file system of its own can be mounted by root only")
    try:
        chunks = models.build(DENSE, Megatron(), "fp32")
        weights.load(chunks, weights.random_tensors(DENSE, seed=0), Mapping(DENSE))
        with pytest.raises(RunFailed, match="the disk is full: the model did not fit into .*export"):
            weights.save_folder(weights.WeightStream(chunks, Mapping(DENSE)), tmp_path / "export", DENSE)
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_critic_is_saved_as_a_classifier_with_one_label(tmp_path):
    chunks = models.build(DENSE, Megatron(), "fp32", value_head=True)
    weights.load(chunks, weights.random_tensors(DENSE, seed=0), Mapping(DENSE))
    torch.nn.init.ones_(chunks[0].output_layer.weight)
    weights.save_folder(weights.WeightStream(chunks, Mapping(DENSE)), tmp_path / "critic", DENSE)
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert model.score.weight.tolist() == [[1.0] * 16]


def test_small_parameters_of_the_same_ranks_are_gathered_together(monkeypatch):
    monkeypatch.setattr(weights, "JOINED", 8)
    kinds = [(0, torch.uint8, 4), (0, torch.uint8, 4), (0, torch.uint8, 1), (0, torch.uint8, 9), (0, torch.uint8, 1)]
    kinds += [(1, torch.uint8, 1), (1, torch.float16, 3), (1, torch.float16, 2)]
    parts = [
        weights.Outgoing(stage, dtype, None, None, str(i), torch.Size([size]), None, [])
        for i, (stage, dtype, size) in enumerate(kinds)
    ]
    assert [len(batch) for batch in weights._joined(parts)] == [1] * 8  # a single rank sends nothing
    monkeypatch.setattr(weights.dist, "get_world_size", lambda: 2)
    batches = [[part.name for part in batch] for batch in weights._joined(parts)]
    assert batches == [["0", "1"], ["2"], ["3"], ["4"], ["5"], ["6"], ["7"]]
