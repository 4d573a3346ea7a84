"""Segments of an episode: one sequence to objectives, several to the model."""

from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file

from megatron_rft.records import Batch, concatenate
from megatron_rft.responses import Prompt, Response, Score
from megatron_rft.rollout.sampler import ScoredResponse, to_batch

# A sub-agent (prompt 20 21) is asked between the two turns of the first conversation (prompt 1 2), whose history the
# program then replaces by a summary (prompt 30). 90 and 91 are the environment's.
FIRST = Response(
    (10, 11, 90, 91, 12, 99), (-1.0, -2.0, 0.0, 0.0, -3.0, 0.0), "stop", 4,
    supports=((10, 5), (11,), (), (), (12,), ()), turns=((0, 2, 0.5), (4, 5, 0.0)), prompt_ids=(1, 2), order=(0, 2),
)  # fmt: skip
AGENT = Response((22, 23), (-4.0, -5.0), "stop", 3, supports=((22,), (23, 6)), prompt_ids=(20, 21), order=(1,))
LAST = Response(
    (31,), (-6.0,), "stop", 5, supports=((31,),), turns=((0, 1, 0.25),), prompt_ids=(30,), order=(3,),
    segments=(FIRST, AGENT),
)  # fmt: skip


def test_an_episode_is_one_response_in_the_order_of_sampling():
    joined = LAST.joined()
    assert joined.prompt_ids == (1, 2)
    assert joined.token_ids == (10, 11, 20, 21, 22, 23, 90, 91, 12, 30, 31)
    assert joined.segment_of == (0, 0, -1, -1, 1, 1, 0, 0, 0, -2, 2)
    assert joined.logprobs == (-1.0, -2.0, 0.0, 0.0, -4.0, -5.0, 0.0, 0.0, -3.0, 0.0, -6.0)
    assert joined.supports == ((10, 5), (11,), (), (), (22,), (23, 6), (), (), (12,), (), (31,))
    assert joined.turns == ((0, 2, 0.5), (4, 6, 0.0), (8, 9, 0.0), (10, 11, 0.25))
    assert joined.weight_version == 3  # the oldest
    for each in (LAST, joined):
        assert each.length == 6 and each.last_turn == (31,)
        assert each.total(Score(1.0)).reward == 1.75
    assert joined.joined() is joined and AGENT.joined() is AGENT


def test_without_an_order_segments_follow_each_other():
    parts = [Response((n, n + 1), (-1.0, -1.0), "stop", 0, prompt_ids=(n + 2,)) for n in (10, 20, 30)]
    joined = replace(parts[2], segments=(parts[0], parts[1])).joined()
    assert joined.token_ids == (10, 11, 22, 20, 21, 32, 30, 31) and joined.supports == ()
    assert joined.turns == ((0, 2, 0.0), (3, 5, 0.0), (6, 8, 0.0))


def batch_of(responses: list[Response]) -> Batch:
    prompt = Prompt(7, (1, 2), "", "")
    return to_batch([ScoredResponse(0, i, prompt, each, "", Score(float(i))) for i, each in enumerate(responses)])


PLAIN = Response((5, 6, 8), (-1.0, 0.0, -2.0), "stop", 6, turns=((0, 1, 0.0), (2, 3, 0.0)))


def test_an_episode_is_one_sequence_of_a_batch():
    batch = batch_of([PLAIN, replace(LAST.joined(), supports=())])
    assert len(batch) == 2 and batch.sequences["rewards"].tolist() == [0, 1]
    assert batch.sequences["weight_version"].tolist() == [6, 3]
    assert batch.response_mask.tolist() == [1, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1]
    assert batch.tokens["turn_rewards"].tolist() == [0.0] * 4 + [0.5] + [0.0] * 8 + [0.25]
    assert batch.segment_counts.tolist() == [1, 3]
    inside, places = batch.by_segment()
    assert inside.prompt_ids.tolist() == [1, 2, 1, 2, 20, 21, 30] and inside.prompt_lens.tolist() == [2, 2, 2, 1]
    assert inside.response_ids.tolist() == [5, 6, 8, 10, 11, 90, 91, 12, 22, 23, 31]
    assert inside.response_lens.tolist() == [3, 5, 2, 1]
    assert torch.equal(batch.response_ids[places], inside.response_ids)


def test_batches_keep_their_segments(tmp_path):
    batch = batch_of([PLAIN, replace(LAST.joined(), supports=())])
    plain = batch_of([PLAIN])
    assert plain.segment_of is None and plain.by_segment()[0] is plain
    both = concatenate([plain, batch.select(torch.tensor([1])), plain])
    assert both.segment_of.tolist() == [0, 0, 0, *LAST.joined().segment_of, 0, 0, 0]
    assert both.select(torch.tensor([0, 2])).by_segment()[0].prompt_ids.tolist() == [1, 2, 1, 2]
    save_file(both.state_dict("p."), tmp_path / "batch")
    again = Batch.from_state_dict(load_file(tmp_path / "batch"), "p.")
    assert torch.equal(again.segment_of, both.segment_of)


def test_images_belong_to_the_first_prompt():
    batch = batch_of([PLAIN, replace(LAST.joined(), supports=())]).with_sequences(images=torch.tensor([4, 5]))
    assert batch.by_segment()[0].images.tolist() == [4, 5, -1, -1]
