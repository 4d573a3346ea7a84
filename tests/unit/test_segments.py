"""Segments of an episode: one sequence to objectives, several to the model."""

from dataclasses import replace

from megatron_rft.responses import Response, Score

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
