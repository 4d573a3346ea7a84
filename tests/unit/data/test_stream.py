from hypothesis import given
from hypothesis import strategies as st

from megatron_rft.data.stream import Stream


def test_epochs_are_permutations_and_differ():
    stream = Stream(list(range(20)), seed=1)
    first, second = stream.next(20), stream.next(20)
    assert sorted(first) == sorted(second) == list(range(20)) and first != second
    assert stream.position == 40 and Stream(list(range(20)), seed=2).next(20) != first
    assert Stream(list(range(20)), shuffle=False).next(25) == [*range(20), *range(5)]


@given(st.integers(1, 12), st.lists(st.integers(0, 30), max_size=6), st.integers(0, 5))
def test_resuming_anywhere_gives_the_same_order(size, draws, cut):
    items = list(range(size))
    whole, parts = Stream(items, seed=3), Stream(items, seed=3)
    for number, count in enumerate(draws):
        if number == cut:
            fresh = Stream(items, seed=3)
            fresh.position, parts = parts.position, fresh
        assert whole.next(count) == parts.next(count)
