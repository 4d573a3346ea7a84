"""Micro-batches: the fed tokens, their distribution over ranks, and which hidden state predicts which token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rft.megatron.packing import PackLayout, filler, pack, zigzag
from megatron_rft.records import Batch

CPU = torch.device("cpu")


def batch(*lengths: tuple[int, int]) -> Batch:
    """Sequences of (prompt, response) lengths; token ids count up over each sequence."""
    prompts = [list(range(p)) for p, _ in lengths]
    return Batch.of(prompts, [list(range(p, p + r)) for p, r in lengths])


def test_packed_by_hand():
    micro = pack(Batch.of([[5, 6], [7]], [[8, 9], [10, 11, 12]]), PackLayout(), CPU)
    assert micro.token_ids.tolist() == [[5, 6, 8, 7, 10, 11]]  # the last token of a sequence is not fed
    assert micro.rows.tolist() == [1, 2, 3, 4, 5]
    assert micro.targets.tolist() == [8, 9, 10, 11, 12]
    assert micro.packed.cu_seqlens_q.tolist() == [0, 3, 6]


def test_padded_by_hand():
    micro = pack(Batch.of([[5, 6], [7]], [[8], [10, 11, 12]]), PackLayout(packed=False), CPU)
    assert micro.token_ids.tolist() == [[5, 6, 0], [7, 10, 11]]
    assert micro.rows.tolist() == [2, 1, 3, 5]  # of [S, b]: position 1 of sequence 0, positions 0 1 2 of sequence 1


@pytest.mark.parametrize("packed", [True, False])
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=6),
    cp=st.sampled_from([1, 2, 3]),
)
def test_every_response_token_is_predicted_once_by_the_token_before_it(packed, lengths, cp):
    whole, seen = batch(*lengths), torch.zeros(sum(r for _, r in lengths))
    for rank in range(cp):
        micro = pack(whole, PackLayout(cp_size=cp, cp_rank=rank, total_multiple=4, packed=packed), CPU)
        flat = micro.token_ids.flatten() if packed else micro.token_ids.t().flatten()
        assert (micro.token_ids.numel() if packed else micro.token_ids.shape[1]) % 4 == 0
        assert torch.equal(flat[micro.rows], micro.targets - 1)  # ids count up, so the predecessor is one less
        seen[micro.kept] += 1
    assert bool((seen == 1).all())


def test_zigzag_by_hand():
    assert zigzag(torch.tensor([8, 4]), 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert zigzag(torch.tensor([8, 4]), 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    with pytest.raises(AssertionError, match="6"):
        zigzag(torch.tensor([6]), 2, 0)


def test_shared_by_hand():
    """Two responses to (5, 6), one of a single token to it, and one to (7) of its own; packed to a multiple of 4."""
    whole = Batch.of([[5, 6], [7], [5, 6], [5, 6]], [[8, 9], [10, 11], [12, 13, 14], [15]])
    micro = pack(whole, PackLayout(share_prompts=True, total_multiple=4), CPU)
    assert micro.token_ids.tolist() == [[5, 6, 8, 12, 13, 7, 10, 0]]
    assert micro.packed.position_ids.tolist() == [0, 1, 2, 2, 3, 0, 1, 0]
    assert micro.rows.tolist() == [1, 2, 5, 6, 1, 3, 4, 1]
    assert micro.packed.segments == (0, 2, 3, 5, 8) and micro.packed.groups == ((0, 2, 5),)
    assert micro.packed.max_seqlen_q == 4 and micro.packed.cu_seqlens_q.tolist() == [0, 8]
    index, ends = micro.packed.gathered
    assert index.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5, 6, 7] and ends == (0, 2, 5, 9, 12)
    call = micro.packed.variable_length
    assert call.cu_seqlens_q.tolist() == [0, 2, 3, 5, 8] and call.cu_seqlens_kv.tolist() == [0, 2, 5, 9, 12]
    assert (call.max_seqlen_q, call.max_seqlen_kv) == (3, 4)


def test_without_a_common_prompt_nothing_changes():
    whole = batch((2, 4), (3, 1), (4, 2))
    shared, apart = (pack(whole, PackLayout(share_prompts=share), CPU) for share in (True, False))
    assert type(shared.packed) is type(apart.packed)
    assert torch.equal(shared.token_ids, apart.token_ids) and torch.equal(shared.rows, apart.rows)


@given(prompts=st.lists(st.integers(1, 3), min_size=1, max_size=8), data=st.data())
def test_every_response_token_is_predicted_by_the_token_before_it_also_behind_a_shared_prompt(prompts, data):
    lengths = [(prompt, data.draw(st.integers(1, 5))) for prompt in prompts]  # a prompt's length says which it is
    whole = batch(*lengths)
    micro = pack(whole, PackLayout(share_prompts=True, total_multiple=2), CPU)
    tokens = micro.token_ids.flatten()
    if len(set(prompts)) < len(prompts):
        assert torch.equal(tokens, micro.packed.position_ids)  # ids count up over a sequence, 0 in padding
    assert torch.equal(tokens[micro.rows], micro.targets - 1)
    computed = sum(set(prompts)) + sum(response - 1 for _, response in lengths)
    assert 0 <= len(tokens) - computed < 2


def test_filler_has_nothing_to_train():
    spare = filler(batch((2, 5), (1, 2)))
    assert len(spare) == 1 and int(spare.lengths) == 3 and not spare.response_mask.any()


def test_a_shared_prompt_has_the_routes_of_its_first_response_and_the_uses_of_all():
    whole = Batch.of([[5, 6], [5, 6]], [[8, 9], [10, 11, 12]])
    routes = [torch.tensor(experts, dtype=torch.int16)[:, None, None] for experts in ([1, 2, 3], [7, 8, 9, 10])]
    micro = pack(whole, PackLayout(share_prompts=True), CPU, routes)
    assert micro.token_ids.tolist() == [[5, 6, 8, 10, 11]]
    assert micro.uses.tolist() == [2, 2, 1, 1, 1]
    assert micro.routes.flatten().tolist() == [1, 2, 3, 9, 10]


def test_a_token_with_any_mask_reaches_the_heads_and_of_none_all_do():
    masks = {"response_mask": torch.tensor([1.0, 0.0, 0.0]), "other_mask": torch.tensor([0.0, 1.0, 0.0])}
    whole = Batch.of([[5]], [[8, 9, 10]])
    assert pack(whole.with_tokens(**masks), PackLayout(), CPU).targets.tolist() == [8, 9]
    assert pack(filler(whole), PackLayout(), CPU).targets.tolist() == [8, 9, 10]
