"""What a checkpoint's forked writer tells the process that forked it."""

import multiprocessing
import os
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from queue import Empty

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rft.megatron import checkpoint, optimizer_shards
from megatron_rft.megatron.checkpoint import Checkpointer, Results
from megatron_rft.utils.checkpoint_files import complete
from megatron_rft.utils.errors import DataError, RunFailed


def forked(action) -> None:
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    os.waitpid(pid, 0)


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_none_that_looks_complete(tmp_path, monkeypatch, one_rank):
    def killed(folder, **_):
        (folder / "weights").unlink()
        raise KeyboardInterrupt

    checkpoints = Checkpointer(tmp_path, {}, keep=1)
    for step in (1, 2):
        partial = tmp_path / f"step_00000{step}.new.partial"
        partial.mkdir()
        for name in ("run.json", "weights", optimizer_shards.file_of(partial, 0).name):
            (partial / name).write_text("{}")
        monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
        with nullcontext() if step == 1 else pytest.raises(KeyboardInterrupt):
            checkpoints._publish(partial, tmp_path / f"step_00000{step}")
    monkeypatch.undo()
    assert [path.name for path in complete(tmp_path)] == ["step_000002"]
    Checkpointer(tmp_path, {})  # of the next start
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002"]


def test_a_result_of_any_size_is_there_once():
    results = Results()
    for content in ({0: [b"x" * 10_000_000]}, {0: ["short"]}, OSError(28, "No space left on device")):
        forked(lambda content=content: results.put(content))
        assert repr(results.get_nowait()) == repr(content)
        with pytest.raises(Empty):
            results.get_nowait()


def test_a_writer_that_was_killed_has_no_result():
    results = Results()
    forked(lambda: results.file.write(b"\x80\x04\x95\x10\x00"))  # while it was writing it
    with pytest.raises(Empty):
        results.get_nowait()
    forked(lambda: results.put("whole"))
    assert results.get_nowait() == "whole"


def test_a_writer_that_does_not_begin_is_replaced(tmp_path, monkeypatch, one_rank):
    begin, forks = checkpoint._begin, tmp_path / "forks"

    def stuck_at_first(*arguments):
        with forks.open("a") as file:
            file.write(f"{os.getpid()} ")
        if len(forks.read_text().split()) == 1:
            time.sleep(600)
        begin(*arguments)

    monkeypatch.setattr(checkpoint, "_begin", stuck_at_first)
    monkeypatch.setattr(checkpoint, "BEGINS_WITHIN", 0.5)
    checkpoints = Checkpointer(tmp_path / "checkpoints", {})
    checkpoints.save(1, {}, {"x": torch.zeros(2)})
    checkpoints.close()
    assert [path.name for path in complete(checkpoints.folder)] == ["step_000001"]
    first, second = map(int, forks.read_text().split())
    multiprocessing.active_children()  # collects those that have ended
    assert first != second and not Path(f"/proc/{first}").exists()


def test_a_writer_that_is_killed_before_it_begins_is_waited_for_no_longer(tmp_path, monkeypatch, one_rank):
    monkeypatch.setattr(checkpoint, "_begin", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    checkpoints = Checkpointer(tmp_path / "checkpoints", {})
    begin = time.monotonic()
    checkpoints.save(1, {}, {"x": torch.zeros(2)})
    assert time.monotonic() - begin < checkpoint.BEGINS_WITHIN
    with pytest.raises((OSError, RunFailed, CheckpointException)):
        checkpoints.wait()
    assert not complete(checkpoints.folder)


def test_a_checkpoint_without_run_json_makes_room_for_its_step(tmp_path, one_rank):
    """It was silently passed over, and the rename of the new checkpoint of its step failed."""
    checkpoints = Checkpointer(tmp_path, {}, asynchronous=False)
    for step in (1, 2):
        checkpoints.save(step, {}, {"x": torch.zeros(2)})
    (tmp_path / "step_000002/run.json").unlink()
    newest, (told,) = checkpoints.newest_intact()
    assert newest == tmp_path / "step_000001" and "step_000002 is damaged (run.json is missing)" in told
    checkpoints.save(2, {}, {"x": torch.zeros(2)})
    assert checkpoints.newest_intact() == (tmp_path / "step_000002", [])
    checkpoints.close()


@pytest.mark.parametrize(
    "error, told",
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
        (OSError(5, "Input/output error"), OSError),
        (CheckpointException("read", {1: (OSError(116, "Stale file handle"), None)}), OSError),
        (FileNotFoundError(2, "No such file or directory"), DataError),
        (CheckpointException("read", {1: (KeyError("a weight"), None)}), DataError),
    ],
)
def test_a_lack_of_memory_and_a_broken_disk_are_not_called_a_changed_model(
    tmp_path, monkeypatch, one_rank, error, told
):
    def fails(*_):
        raise error

    checkpoints = Checkpointer(tmp_path, {}, asynchronous=False)
    checkpoints.save(1, {}, {"x": torch.zeros(2)})
    monkeypatch.setattr(checkpoint.dist_checkpointing, "load", fails)
    with pytest.raises(told) as found:
        checkpoints.load(tmp_path / "step_000001")
    assert ("Was the model or the optimizer changed?" in str(found.value)) == (told is DataError)
    checkpoints.close()


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(tmp_path, monkeypatch, one_rank):
    """On NFS a file that another process reads stays in its folder under another name."""
    checkpoints = Checkpointer(tmp_path, {}, keep=1, asynchronous=False)
    checkpoints.save(1, {}, {"x": torch.zeros(2)})
    rmdir = os.rmdir

    def busy(path, **where):
        if "step_000001" in str(path):
            raise OSError(39, "Directory not empty", str(path))
        rmdir(path, **where)

    monkeypatch.setattr(os, "rmdir", busy)
    checkpoints.save(2, {}, {"x": torch.zeros(2)})
    checkpoints.close()
    assert [path.name for path in complete(tmp_path)] == ["step_000002"]
