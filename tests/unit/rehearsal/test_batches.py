"""Batches of a rehearsal: full, identical micro-batches within the recipe's limits."""

import torch

from megatron_rft.rehearsal.batches import FILL, batch_of, micro_batch, with_contexts, with_refined


def test_a_micro_batch_is_full_and_no_response_is_too_long():
    for prompt, longest, budget in ((256, 4096, 18432), (16, 40, 8192), (1024, 1024, 12288), (512, 8192, 9000)):
        shape = micro_batch(prompt, longest, 0.5, budget)
        tokens = len(shape.responses) * prompt + sum(shape.responses)
        assert max(shape.responses) <= longest and tokens <= budget
        assert tokens > 0.9 * FILL * budget or set(shape.responses) == {longest}


def test_a_response_longer_than_the_rest_stands_alone():
    shape = micro_batch(100, 4000, 1.0, 4100)
    (response,) = shape.responses
    assert 100 + response <= 4100


def test_micro_batches_are_alike():
    shape = micro_batch(10, 50, 0.5, 200)
    batch = batch_of(shape, 4 * len(shape.responses), 2)
    lengths = batch.response_lens.view(4, -1)
    assert (lengths == lengths[0]).all() and lengths[0].tolist() == list(shape.responses)
    assert batch.groups.tolist() == sorted(batch.groups.tolist())


def test_contexts_and_refined_responses():
    batch = batch_of(micro_batch(10, 50, 0.5, 200), 6, 2)
    told = with_contexts(batch, 7).in_context()
    assert torch.equal(told.prompt_lens, batch.prompt_lens + 7)
    refined = with_refined(batch)
    assert (refined.refined_lens > 0).tolist() == [True, False] * 3
