"""Ragged batches: selection, concatenation, saving and loading, on numbers that can be checked by hand."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rft.records import Batch, Score, concatenate, segment_ids, take_segments


@pytest.fixture
def batch() -> Batch:
    """The example of the module's header, with a third sequence."""
    whole = Batch.of([[5, 6], [7], [3, 3]], [[8, 9, 2], [2], [4, 2]])
    whole = whole.with_tokens(old_logprobs=torch.tensor([-1.0, -2, -3, -4, -5, -6]))
    return whole.with_sequences(rewards=torch.tensor([1.0, 0, 0.5])).with_scalars(sampled_count=3.0)


def test_segments():
    assert segment_ids(torch.tensor([3, 0, 1])).tolist() == [0, 0, 0, 2]
    taken = take_segments(torch.arange(6), torch.tensor([3, 1, 2]), torch.tensor([2, 0]))
    assert taken.tolist() == [4, 5, 0, 1, 2]


def test_select(batch):
    part = batch.select(torch.tensor([2, 0]))
    assert part.prompt_ids.tolist() == [3, 3, 5, 6]
    assert part.response_ids.tolist() == [4, 2, 8, 9, 2]
    assert part.tokens["old_logprobs"].tolist() == [-5, -6, -1, -2, -3]
    assert part.sequences["rewards"].tolist() == [0.5, 1.0]
    assert torch.equal(batch.select(torch.tensor([True, False, True])).response_ids, torch.tensor([8, 9, 2, 4, 2]))
    assert len(batch.select(torch.zeros(3, dtype=torch.bool))) == 0


def test_concatenate_undoes_select(batch):
    parts = [batch.select(torch.tensor([i])) for i in range(3)]
    whole = concatenate(parts)
    assert all(torch.equal(v, whole.state_dict()[k]) for k, v in batch.state_dict().items() if "scalars" not in k)
    assert whole.scalars == {"sampled_count": 9.0}  # scalars add up


def test_state_survives_a_file(batch, tmp_path):
    save_file(batch.state_dict("previous."), tmp_path / "batch.safetensors")
    again = Batch.from_state_dict(load_file(tmp_path / "batch.safetensors"), "previous.")
    assert again.scalars == batch.scalars
    assert all(torch.equal(v, again.state_dict()[k]) for k, v in batch.state_dict().items())


def test_a_value_of_the_wrong_length_fails_an_assertion(batch):
    with pytest.raises(AssertionError, match="advantages: 2 values, 6 tokens"):
        batch.with_tokens(advantages=torch.zeros(2))


def with_contexts() -> Batch:
    batch = Batch.of([[1, 2], [3], [4]], [[10], [11, 12], [13]])
    return batch.with_contexts([[7, 7, 7], [], [8]])


def test_in_context_the_same_responses_have_other_prompts():
    """Without a context the prompt stays."""
    other = with_contexts().in_context()
    assert other.prompt_ids.tolist() == [7, 7, 7, 3, 8] and other.prompt_lens.tolist() == [3, 1, 1]
    assert other.response_ids.tolist() == [10, 11, 12, 13] and other.context_ids is None


def test_contexts_follow_their_sequences():
    batch = with_contexts()
    chosen = batch.select(torch.tensor([2, 0]))
    assert chosen.context_ids.tolist() == [8, 7, 7, 7] and chosen.context_lens.tolist() == [1, 3]
    both = concatenate([chosen, batch])
    assert both.context_lens.tolist() == [1, 3, 3, 0, 1] and both.context_ids.tolist() == [8, 7, 7, 7, 7, 7, 7, 8]
    again = Batch.from_state_dict(batch.state_dict("x."), "x.")
    assert again.context_ids.tolist() == [7, 7, 7, 8] and again.context_lens.tolist() == [3, 0, 1]
    assert batch.only(set(), set()).context_ids is None


def test_supports_follow_their_tokens_by_hand():
    """Two responses (8 9) and (2): the first token was sampled from {8, 3}, the second from {9}, the third from all."""
    batch = Batch.of([[5], [7]], [[8, 9], [2]]).with_supports([((8, 3), (9,)), ((),)])
    assert batch.support_ids.tolist() == [8, 3, 9] and batch.support_lens.tolist() == [2, 1, 0]
    turned = batch.select(torch.tensor([1, 0]))
    assert turned.support_ids.tolist() == [8, 3, 9] and turned.support_lens.tolist() == [0, 2, 1]
    both = concatenate([turned.only(set(), set()), batch])
    assert [part.tolist() for part in both.support_of(torch.tensor([1, 4]))] == [[8, 3, 9], [2, 1]]
    again = Batch.from_state_dict(both.state_dict("kept."), "kept.")
    assert again.support_ids.equal(both.support_ids) and again.support_lens.equal(both.support_lens)
    assert batch.select(torch.tensor([1])).support_ids.tolist() == []


def test_a_users_score_can_be_written_as_json():
    for number in (np.float32(0.5), torch.tensor(0.5), 0.5):
        score = Score(number, None, shaping=number)
        assert json.dumps([score.reward, score.shaping, score.reason]) == '[0.5, 0.5, ""]'
    assert Score(True).reward is not True and Score(True).reward == 1.0
