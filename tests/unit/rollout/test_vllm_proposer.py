"""Where a response is in the guess of it, and what is proposed from there."""

from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rft.rollout.vllm_proposer import PredictedOutput, place_in

DRAFT = [10, 11, 12, 13, 14, 15, 16, 17]


@pytest.mark.parametrize(
    "written, shift, place",
    [
        ([10], 0, 1),
        ([10, 11, 12, 13], 0, 4),
        ([9, 9, 10, 11, 12], 0, 3),  # two tokens before it
        ([12, 13, 14], 0, 5),  # without its beginning
        ([10, 11, 99], 0, None),
        ([15, 16, 17], 0, 8),  # its end
    ],
)
def test_place(written, shift, place):
    assert place_in(DRAFT, written, shift) == place


def test_of_several_places_the_nearest_to_the_one_expected():
    draft = [1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3, 9]
    assert place_in(draft, [5, 1, 2, 3], 0) == 3
    assert place_in(draft, [1, 2, 3, 7, 5, 1, 2, 3], -1) == 7
    assert place_in(draft, [1, 2, 3], 8) == 11


def proposer(draft, written, count=4, longest=100) -> PredictedOutput:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=count),
        model_config=SimpleNamespace(max_model_len=longest),
    )
    made = PredictedOutput(config)
    request = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=draft), prompt_token_ids=[1, 1])
    made.runner = SimpleNamespace(requests={"a": request}, input_batch=SimpleNamespace(req_ids=["a"]))
    made.row = np.array([[1, 1, *written, 0, 0]])
    return made


def proposed(made: PredictedOutput, sampled=(1,)) -> list[int]:
    (found,) = made.propose([list(sampled)], np.array([made.row.shape[1] - 2]), made.row)
    return found


def test_proposals():
    assert proposed(proposer({"draft": DRAFT}, [10, 11, 12])) == [13, 14, 15, 16]
    assert proposed(proposer({"draft": DRAFT}, [10, 11, 12], longest=8)) == [13, 14], "within the longest sequence"
    assert proposed(proposer({"draft": DRAFT}, [10, 11, 99])) == [13, 14, 15], "as if one was replaced"
    assert proposed(proposer({"draft": DRAFT}, [15, 16, 17])) == []
    assert proposed(proposer(None, [10, 11])) == [] and proposed(proposer({"draft": DRAFT}, [10], 4), ()) == []


def test_a_shift_is_remembered_while_the_request_lives():
    made = proposer({"draft": DRAFT}, [9, 9, 10, 11, 12])
    assert proposed(made) == [13, 14, 15, 16] and made.shifts == {"a": -2}
    made.row = np.array([[1, 1, 9, 9, 10, 11, 12, 99, 0, 0]])
    assert proposed(made) == [14, 15, 16]
    made.runner.input_batch.req_ids = ["b"]
    made.runner.requests = {"b": made.runner.requests["a"]}
    proposed(made)
    assert "a" not in made.shifts


def test_nothing_is_proposed_while_vllm_warms_up():
    made = proposer({"draft": DRAFT}, [10])
    made.runner = None
    assert proposed(made) == []
