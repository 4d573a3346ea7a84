"""What every trainer finds prepared."""

from megatron.core.dist_checkpointing.strategies import filesystem_async

from megatron_rft import training
from megatron_rft.config import load
from megatron_rft.training import online
from tests.integration.tiny import write_recipe


def test_the_checkpoint_writers_queue_is_forked_before_there_are_models(tmp_path, monkeypatch):
    """Forked later, its process would keep a copy of weights and moments for the whole run."""
    found = []
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    monkeypatch.setattr(online, "train", lambda recipe: found.append(filesystem_async._results_queue) or 0)
    assert training.train(load(write_recipe(tmp_path))) == 0
    assert found[0] is not None
