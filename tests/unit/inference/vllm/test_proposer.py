"""The tokens proposed to vLLM from the drafts of a batch's requests."""

from types import SimpleNamespace

import numpy as np

from megatron_rft.inference.vllm.proposer import DraftPosition, PredictedOutput

DRAFT = [10, 11, 12, 13, 14, 15, 16, 17]


def proposer(longest=100, count=4) -> PredictedOutput:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=count),
        model_config=SimpleNamespace(max_model_len=longest),
    )
    return PredictedOutput(config)


def serve(made: PredictedOutput, **drafts: list[int] | None) -> PredictedOutput:
    requests = {
        id: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=draft and {"draft": draft}))
        for id, draft in drafts.items()
    }
    made.runner = SimpleNamespace(requests=requests, input_batch=SimpleNamespace(req_ids=list(drafts)))
    return made


def step(made: PredictedOutput, *rows: tuple[list[int], int]) -> list[list[int]]:
    """Rows of (prompt and response, number of new tokens)."""
    width = max(len(tokens) for tokens, _ in rows)
    table = np.array([tokens + [0] * (width - len(tokens)) for tokens, _ in rows])
    sampled = [tokens[len(tokens) - new :] for tokens, new in rows]
    return made.propose(sampled, np.array([len(tokens) for tokens, _ in rows]), table)


def test_each_row_has_its_own_draft():
    made = serve(proposer(), a=DRAFT, b=None, c=DRAFT)
    assert step(made, ([1, 10], 1), ([1, 5], 1), ([1, 1, 99], 1)) == [[11, 12, 13, 14], [], [11, 12, 13, 14]]
    first = ([1, 10, 11, 12, 13, 14, 15], 5)
    assert step(made, first, ([1, 5, 5], 1), ([1, 1, 99, 11, 12], 2)) == [[16, 17], [], [13, 14, 15, 16]]
    assert step(made, ([*first[0], 16, 17], 2), ([1, 5, 5, 5], 1), ([1], 0)) == [[], [], []]


def test_within_the_longest_sequence():
    assert step(serve(proposer(longest=5), a=DRAFT), ([1, 10], 1)) == [[11, 12]]
    assert step(serve(proposer(longest=3), a=DRAFT), ([1, 10], 1)) == [[]]


def test_a_position_goes_with_its_request():
    made = serve(proposer(), a=DRAFT)
    step(made, ([1, 10], 1))
    assert list(made.positions) == ["a"]
    step(serve(made, b=DRAFT), ([1, 10], 1))
    assert list(made.positions) == ["b"]


def test_nothing_is_proposed_while_vllm_warms_up():
    assert proposer().propose([[1], []], np.array([2, 2]), np.zeros((2, 4))) == [[], []]


def test_the_position_in_a_draft_by_hand():
    """Draft 1 2 3 4 5 6; the response changes 3 to 9, then leaves out 4."""
    position = DraftPosition((1, 2, 3, 4, 5, 6))
    assert position.proposal() == (1, 2, 3, 4, 5, 6)
    position.update([1], 1)
    assert position.proposal() == (2, 3, 4, 5, 6)
    position.update([1, 2, 9], 2)
    assert position.proposal() == (4, 5, 6)  # one token is taken to have been changed
    position.update([2, 9, 5], 1)
    assert position.proposal() == (5, 6)  # and one more
    position.update([9, 5, 6], 2)
    assert position.proposal() == ()  # 5 6 is found again, at the end
