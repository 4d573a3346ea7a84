"""Early stopping by hand, and through a checkpoint's state."""

import torch

from megatron_rft.training.early_stopping import Selection


def test_by_hand():
    """Best at step 20; two evaluations without a new best end the run."""
    selection, seen = Selection(patience=2), []
    for step, accuracy in ((10, 0.3), (20, 0.5), (30, 0.5), (40, 0.4)):
        assert not selection.exhausted
        selection = selection.judged(accuracy, step)
        seen.append((selection.step, selection.waited))
    assert seen == [(10, 0), (20, 0), (20, 1), (20, 2)]
    assert selection.exhausted and selection.best == 0.5


def test_a_first_evaluation_of_nothing_right_is_the_best_so_far():
    assert Selection().judged(0.0, 5).step == 5 and not Selection().judged(0.0, 5).judged(0.0, 6).exhausted


def test_goes_through_a_state_beside_the_objectives():
    selection = Selection(patience=3).judged(1 / 3, 7).judged(0.1, 8)
    found, rest = Selection(patience=3).out_of(selection.into({"mine": torch.ones(2)}))
    assert found == selection and list(rest) == ["mine"]
    assert Selection(patience=3).out_of({}) == (Selection(patience=3), {})
