"""What a checkpoint's forked writer tells the process that forked it."""

import os
from queue import Empty

import pytest

from megatron_rft.megatron.checkpoint import Results


def forked(action) -> None:
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    os.waitpid(pid, 0)


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
