"""Splitting parameters over tensor-parallel ranks, and joining them."""

import pytest
import torch

from megatron_rft.conversion import partition_dim, shard, unshard

WHOLE = torch.arange(12.0).view(6, 2)


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("embedding.word_embeddings.weight", 0),
        ("output_layer.weight", 0),
        ("value_head.weight", None),
        ("decoder.final_layernorm.weight", None),
        ("decoder.layers.0.self_attention.linear_qkv.weight", 0),
        ("decoder.layers.0.self_attention.linear_qkv.bias", 0),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", None),
        ("decoder.layers.0.self_attention.linear_proj.weight", 1),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", None),
        ("decoder.layers.0.mlp.router.weight", None),
        ("decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight", 1),
    ],
)
def test_the_dimension_that_is_cut(name, dim):
    assert partition_dim(name) == dim


def test_gate_and_up_are_each_cut():
    """Rows 0..3 are the gate's, 4..7 up's: rank 0 of 2 has 0 1 4 5."""
    name, whole = "decoder.layers.0.mlp.linear_fc1.weight", torch.arange(8)[:, None]
    parts = [shard(name, whole, 2, rank) for rank in range(2)]
    assert parts[0].flatten().tolist() == [0, 1, 4, 5]
    assert torch.equal(unshard(name, parts, 99), whole)


def test_vocabulary_rows_are_padded_and_dropped_again():
    name, whole = "output_layer.weight", WHOLE[:5]
    parts = [shard(name, whole, 2, rank) for rank in range(2)]
    assert parts[1].tolist() == [[6, 7], [8, 9], [0, 0]]
    assert torch.equal(unshard(name, parts, vocab_size=5), whole)


@pytest.mark.parametrize(
    "name", ["decoder.layers.0.self_attention.linear_proj.weight", "decoder.layers.0.self_attention.linear_qkv.weight"]
)
def test_row_and_column_round_trip(name):
    parts = [shard(name, WHOLE, 2, rank) for rank in range(2)]
    assert torch.equal(unshard(name, parts, 99), WHOLE)
    assert parts[0].shape == ((6, 1) if "proj" in name else (3, 2))
