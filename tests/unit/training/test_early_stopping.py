"""Early stopping by hand, and through a checkpoint's state."""

import gc
import math
from types import SimpleNamespace

import pytest
import torch

from megatron_rft.training import evaluator
from megatron_rft.training.evaluator import BestModel
from megatron_rft.training.run import TrainingRun


@pytest.fixture
def best_model(tmp_path, monkeypatch):
    """(patience) -> a BestModel of an actor that loads a text; `loaded` has the texts."""
    loaded = []
    actor = SimpleNamespace(stream=lambda **_: iter(()), hf_config=None, load=loaded.append, lora=None, loaded=loaded)
    monkeypatch.setattr(evaluator.weights, "save_folder", write)
    monkeypatch.setattr(evaluator.weights, "open_folder", lambda folder, config: (folder / "model").read_text())
    return lambda patience=None: BestModel(actor, tmp_path / "best", tmp_path, patience)


def judged(best: BestModel, *accuracies: float) -> BestModel:
    """After evaluations at steps 10, 20 ..."""
    for number, accuracy in enumerate(accuracies, start=1):
        best.judge(accuracy, 10 * number)
    return best


def test_by_hand(best_model):
    """Best at step 20; two evaluations without a new best end the run."""
    best, seen = best_model(patience=2), []
    for step, accuracy in ((10, 0.3), (20, 0.5), (30, 0.5), (40, 0.4)):
        assert not best.exhausted
        best.judge(accuracy, step)
        seen.append((best.step, best.waited))
    assert seen == [(10, 0), (20, 0), (20, 1), (20, 2)]
    assert best.exhausted and best.accuracy == 0.5


def test_a_first_evaluation_of_nothing_right_is_the_best_so_far(best_model):
    assert judged(best_model(), 0.0).step == 10 and not judged(best_model(), 0.0, 0.0).exhausted


def test_an_evaluation_that_graded_nothing_is_no_best(best_model):
    best = judged(best_model(patience=3), 0.6, math.nan, 0.3)
    assert (best.accuracy, best.step, best.waited) == (0.6, 10, 2)


def test_goes_through_a_state_beside_the_objectives(best_model):
    best, again = judged(best_model(patience=3), 1 / 3, 0.1), best_model(patience=3)
    assert list(again.restore(best.state() | {"mine": torch.ones(2)})) == ["mine"]
    assert (again.accuracy, again.step, again.waited) == (1 / 3, 10, 1)
    assert best_model().restore({}) == {}


def test_the_folder_says_which_evaluation_its_model_is_of(best_model):
    """A run was killed between an evaluation and the next checkpoint, and did not evaluate that step again."""
    killed, resumed = best_model(), best_model()
    assert killed.load() is None
    killed.judge(0.2, 8)
    resumed.restore(killed.state())
    killed.judge(0.3, 10)
    assert resumed.load() == killed.load() == (10, 0.3) and len(killed.actor.loaded) == 2


def write(stream, folder, config, tokenizer_folder, beside):
    folder.mkdir(exist_ok=True)
    for name, text in (beside | {"model": "weights"}).items():
        (folder / name).write_text(text)


def test_during_the_steps_the_garbage_collector_leaves_out_what_was_there_before():
    run = SimpleNamespace(done=3, total_steps=5, best=None)
    steps = TrainingRun.steps(run)
    assert next(steps) == 4 and gc.get_freeze_count() > 10_000
    assert list(steps) == [5] and gc.get_freeze_count() > 10_000
