"""Early stopping by hand, and through a checkpoint's state."""

import gc
from types import SimpleNamespace

import torch

from megatron_rft.training import evaluator
from megatron_rft.training.evaluator import BestModel, Selection
from megatron_rft.training.run import TrainingRun


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


def test_the_folder_says_which_evaluation_its_model_is_of(tmp_path, monkeypatch):
    """A run was killed between an evaluation and the next checkpoint, and did not evaluate that step again."""
    loaded = []
    actor = SimpleNamespace(stream=lambda **_: iter(()), hf_config=None, load=loaded.append, lora=None)
    monkeypatch.setattr(evaluator.weights, "save_folder", write)
    monkeypatch.setattr(evaluator.weights, "open_folder", lambda folder, config: (folder / "model").read_text())
    killed, resumed = (BestModel(actor, tmp_path / "best", tmp_path, None) for _ in range(2))
    assert killed.load() is None
    killed.judge(0.2, 8)
    resumed.selection = killed.selection
    killed.judge(0.3, 10)
    assert resumed.load() == killed.load() == (10, 0.3) and len(loaded) == 2


def write(stream, folder, config, tokenizer_folder, beside):
    folder.mkdir(exist_ok=True)
    for name, text in (beside | {"model": "weights"}).items():
        (folder / name).write_text(text)


def test_during_the_steps_the_garbage_collector_leaves_out_what_was_there_before():
    run = SimpleNamespace(done=3, total_steps=5, best=None)
    steps = TrainingRun.steps(run)
    assert next(steps) == 4 and gc.get_freeze_count() > 10_000
    assert list(steps) == [5] and gc.get_freeze_count() == 0
