"""Keys of prompts that a layer holds once for all rows that continue them."""

import pytest
import torch

from megatron_rft.inference.hf.attention import Continuations, InPlaceLayer, Shared


@pytest.mark.parametrize("own", [[0, 0, 0, 1, 3, 3], [0, 0, 1, 1, 2, 2, 3, 3], [2]])
def test_products_are_those_of_each_row_with_its_prompt(own):
    torch.manual_seed(0)
    keys, values, own = torch.randn(4, 2, 5, 8), torch.randn(4, 2, 5, 6), torch.tensor(own)
    rows, weights = torch.randn(len(own), 2, 3, 8), torch.randn(len(own), 2, 3, 5)
    shared = Shared(keys, values, Continuations(own))
    assert len(shared.keys) == len(own.unique()), "a prompt that no row continues is dropped"
    torch.testing.assert_close(shared.rows.times(rows, shared.keys.mT), rows @ keys[own].mT)
    torch.testing.assert_close(shared.rows.times(weights, shared.values), weights @ values[own])


def test_a_layer_holds_a_prompt_once_and_its_rows_what_follows():
    layer, prompts, new = InPlaceLayer(), torch.randn(3, 2, 5, 8), torch.randn(6, 2, 1, 8)
    layer.update(prompts, prompts)
    layer.share(rows := Continuations(torch.tensor([0, 0, 1, 1, 2, 2])))
    keys, _ = layer.update(new, new)
    assert keys.shape == (6, 2, 1, 8) and layer.get_seq_length() == 6
    layer.reorder_cache(left := torch.tensor([0, 4, 5]))  # the second prompt's rows have ended
    assert layer.keys.shape == (3, 2, 1, 8) and layer.get_seq_length() == 6
    torch.testing.assert_close(layer.shared.keys, prompts[[0, 2]])
    assert layer.shared.rows.own.tolist() == [0, 1, 1]
    assert layer.shared.rows is rows.kept(left), "the next layer has the same"
    assert rows.kept(left[:1]).own.tolist() == [0]
