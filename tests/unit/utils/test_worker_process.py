"""A process that answers messages: with values, with failures of the code, and lost or late."""

import time

import pytest

from megatron_rft.utils.errors import CodeError, ConfigError
from megatron_rft.utils.worker_process import CallFailed, ProcessLost, WorkerProcess

PROGRAM = """
import os, sys, time
from megatron_rft.utils.errors import CodeError
from megatron_rft.utils.worker_process import failure, serve

def make(fails):
    if fails:
        sys.exit("no model here")
    return handle, "here"

def handle(send, what):
    try:
        match what:
            case "raises":
                raise LookupError("half \\ud800")
            case "exits":
                sys.exit(4)
            case "breaks":
                raise CodeError("it is odd")
            case "dies":
                os._exit(5)
            case "sleeps":
                time.sleep(60)
        send({"value": [what, os.getpid()]})
    except BaseException as error:
        send(failure(error))

if __name__ == "__main__":
    serve(make)
"""


@pytest.fixture
def process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answering.py").write_text(PROGRAM)
    made = []

    def start(fails: bool = False) -> WorkerProcess:
        made.append(WorkerProcess("answering", {"fails": fails}, 20.0, tmp_path / "log", "section", "section.limit"))
        made[-1].running()
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_values_and_failures(process):
    one = process()
    what, pid = one.answer(what="hello")
    assert (what, one.about) == ("hello", "here")
    with pytest.raises(CallFailed, match=r"LookupError: half \\ud800 \(answering.py, line 15\)"):
        one.answer(what="raises")
    with pytest.raises(CallFailed, match=r"SystemExit: 4 \(answering.py, line 17\)"):
        one.answer(what="exits")
    with pytest.raises(CodeError, match="it is odd"):
        one.answer(what="breaks")
    assert one.answer(what="again") == ["again", pid]


def test_a_lost_and_a_late_process_are_replaced(process):
    one = process()
    _, pid = one.answer(what="first")
    with pytest.raises(ProcessLost, match="its process ended with status 5; its output is in .*log"):
        one.answer(what="dies")
    one.running()
    one.timeout_s = 0.2
    with pytest.raises(CallFailed, match=r"gave no answer within 0.2 s \(section.limit\)"):
        one.answer(what="sleeps")
    one.running()
    one.timeout_s = 20.0
    assert one.answer(what="last")[1] != pid


def test_a_call_that_waits_has_failed_when_the_process_is_closed(process):
    """No two threads close the connection, and the thread of the calls starts no other process."""
    one = process()
    waiting, later = one.thread.submit(one.answer, what="sleeps"), one.thread.submit(one.running)
    while not waiting.running():
        time.sleep(0.01)
    one.close()
    assert isinstance(waiting.exception(timeout=0), ProcessLost) and later.cancelled() and one.process is None


def test_a_process_that_starts_while_it_is_closed_ends(process):
    one = process()
    one.close()
    with pytest.raises(ConfigError, match="its process was killed|ended with status"):
        one.running()
    assert one.process is None


def test_code_that_cannot_start(process):
    with pytest.raises(ConfigError, match=r"section: SystemExit: no model here \(answering.py, line 8\)"):
        process(fails=True)
