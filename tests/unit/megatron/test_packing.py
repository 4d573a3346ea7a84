"""Micro-batches: who gets what, what is fed, and which hidden state predicts which token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_rft.megatron.balance import plan
from megatron_rft.megatron.packing import Layout, filler, pack, zigzag
from megatron_rft.records import Batch

CPU = torch.device("cpu")


def batch(*lengths: tuple[int, int]) -> Batch:
    """Sequences of (prompt, response) lengths; token ids count up over each sequence."""
    prompts = [list(range(p)) for p, _ in lengths]
    return Batch.of(prompts, [list(range(p, p + r)) for p, r in lengths])


def test_packed_by_hand():
    micro = pack(Batch.of([[5, 6], [7]], [[8, 9], [10, 11, 12]]), Layout(), CPU)
    assert micro.token_ids.tolist() == [[5, 6, 8, 7, 10, 11]]  # the last token of a sequence is not fed
    assert micro.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert micro.rows.tolist() == [1, 2, 3, 4, 5]
    assert micro.targets.tolist() == [8, 9, 10, 11, 12]
    assert micro.packed.cu_seqlens_q.tolist() == [0, 3, 6]


def test_padded_by_hand():
    micro = pack(Batch.of([[5, 6], [7]], [[8], [10, 11, 12]]), Layout(packed=False), CPU)
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
        micro = pack(whole, Layout(cp_size=cp, cp_rank=rank, total_multiple=4, packed=packed), CPU)
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


@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=1, max_size=30),
    dp=st.integers(1, 4),
    multiple=st.sampled_from([1, 2, 4]),
)
def test_plan_holds_every_sequence_once_within_the_budget(lengths, dp, multiple):
    whole = batch(*lengths)
    shares = plan(whole, dp, token_budget=80, count_multiple=multiple)
    assert len(shares) == dp and len({len(share) for share in shares}) == 1
    assert len(shares[0]) % multiple == 0
    placed = torch.cat([index for share in shares for index in share])
    assert sorted(placed.tolist()) == list(range(len(lengths)))
    assert all(int((whole.lengths[index] - 1).sum()) <= 80 for share in shares for index in share)


def test_plan_balances_tokens_over_ranks():
    whole = batch(*[(4, n) for n in range(1, 65)])
    loads = [sum(int(whole.lengths[i].sum()) for i in share) for share in plan(whole, 4, token_budget=400)]
    assert max(loads) - min(loads) <= 0.02 * sum(loads)


def test_units_stay_together():
    whole = batch(*[(2, 5)] * 8).with_sequences(unit=torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]))
    for share in plan(whole, 2, token_budget=12):
        for index in share:
            assert sorted(index.tolist()) == sorted(set(index.tolist()) & set(range(8)))
            assert len(index) == 2 and index[1] - index[0] == 4


def test_filler_has_nothing_to_train():
    spare = filler(batch((2, 5), (1, 2)))
    assert len(spare) == 1 and int(spare.lengths) == 3 and not spare.response_mask.any()
