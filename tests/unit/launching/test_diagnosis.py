"""Which rank is named, from where the ranks are."""

from dataclasses import replace

from megatron_rft.launching.diagnosis import RankState, describe, diagnose


def state(rank, *groups, waiting=True, **more):
    """`groups`: (name, members, operation, number), the last collective at the end."""
    known = {name: (members, operation, number) for name, members, operation, number in groups}
    here = {"step": 7, "phase": "training", "still_s": 60.0} | more
    return RankState(rank, host=f"n{rank // 2}", waiting=waiting, groups=known, last=groups[-1][0], **here)


def all_at(number, ranks=4):
    return [state(rank, ("0 world", "0-3/1", "all_reduce", number)) for rank in range(ranks)]


def test_a_stopped_rank():
    states = [*all_at(9)[:2], replace(all_at(9)[2], state="T"), all_at(9)[3]]
    found = diagnose(states)
    assert found.sentence.startswith("rank 2 on node n1 is stopped; it is in step 7, training")


def test_a_rank_that_did_not_come():
    states = all_at(9)
    states[3] = state(3, ("0 world", "0-3/1", "all_reduce", 8), waiting=False, phase="reward", micro_batch=2)
    found = diagnose(states)
    assert found.sentence.startswith("rank 3 on node n1 has not come to all_reduce no. 9 of group 0 world")
    assert found.sentence.endswith("it is in step 7, reward, micro-batch 2, for 60 s")
    assert "    all_reduce no. 9 of group 0 world: rank 3 has not come" in describe(states)


def test_the_only_rank():
    found = diagnose([state(0, ("0 world", "0", "all_reduce", 9), waiting=False)])
    assert found.sentence == "rank 0 on node n0 does not move; it is in step 7, training, for 60 s"


def test_the_root_of_a_chain_is_named():
    """Rank 0 waits for rank 1 in their group, rank 1 for rank 3 in another; rank 3 works."""
    states = [
        state(0, ("1 tp", "0,1", "all_reduce", 5)),
        state(1, ("1 tp", "0,1", "all_reduce", 4), ("3 dp", "1,3", "all_gather", 7)),
        state(2, ("2 tp", "2,3", "all_reduce", 5)),
        state(3, ("2 tp", "2,3", "all_reduce", 4), ("3 dp", "1,3", "all_gather", 6), waiting=False),
    ]
    assert [each.rank for each in diagnose(states).guilty] == [3]


def test_a_receiver_waits_for_its_sender_and_not_the_other_way_round():
    states = [
        state(0, ("4 from 0 to 1", "0,1", "send", 6), waiting=False),
        state(1, ("4 from 0 to 1", "0,1", "recv", 7)),
    ]
    assert [each.rank for each in diagnose(states).guilty] == [0]
    ahead = [
        state(0, ("4 from 0 to 1", "0,1", "send", 8), ("0 world", "0,1", "all_reduce", 3)),
        state(1, ("0 world", "0,1", "all_reduce", 2), ("4 from 0 to 1", "0,1", "recv", 7), waiting=False),
    ]
    assert [each.rank for each in diagnose(ahead).guilty] == [1]


def test_two_groups_of_which_one_rank_is_in_the_wrong_one():
    """Rank 2 calls a broadcast in the world, the others reduce in it."""
    states = all_at(9)
    states[2] = state(2, ("0 world", "0-3/1", "broadcast", 9))
    found = diagnose(states)
    assert [each.rank for each in found.guilty] == [2] and "broadcast no. 9" in found.sentence
    crossed = [
        state(0, ("0 world", "0-3/1", "all_reduce", 9), ("5 host", "0-3/1", "barrier", 2)),
        state(1, ("0 world", "0-3/1", "all_reduce", 9), ("5 host", "0-3/1", "barrier", 2)),
        state(2, ("5 host", "0-3/1", "barrier", 1), ("0 world", "0-3/1", "all_reduce", 10)),
        state(3, ("0 world", "0-3/1", "all_reduce", 9), ("5 host", "0-3/1", "barrier", 2)),
    ]
    assert [each.rank for each in diagnose(crossed).guilty] == [2]
    assert "rank 2 in all_reduce no. 10" in diagnose(crossed).sentence


def test_an_engine_that_is_stopped():
    states = [replace(all_at(9)[0], waiting=False, stopped=("pid 77",), phase="generation"), *all_at(9)[1:]]
    assert "rank 0 on node n0 waits for a process of its own that is stopped (pid 77)" in diagnose(states).sentence


def test_of_two_ranks_that_disagree_both_are_named():
    states = [
        state(0, ("0 world", "0,1", "all_reduce", 3), ("2 host", "0,1", "all_gather", 12), phase="evaluation"),
        state(1, ("2 host", "0,1", "all_gather", 11), ("0 world", "0,1", "barrier", 4), phase="sync"),
    ]
    told = diagnose(states).sentence
    assert "rank 0 on node n0 in all_gather no. 12" in told and "rank 1 on node n0 in barrier no. 4" in told
