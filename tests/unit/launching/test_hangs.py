"""When it counts as a hang, over nodes, and which node a job excludes."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

from megatron_rft.config.sections import Faults
from megatron_rft.launching import hangs
from megatron_rft.launching.hangs import (
    LEARNED_STEPS,
    SHORTEST_S,
    Pauses,
    Watch,
    position_file,
    stack_folder,
    wait_until_written,
)
from megatron_rft.launching.job import Job
from megatron_rft.launching.slurm import Node
from megatron_rft.utils.position import Here, read_nodes

LATER = LEARNED_STEPS + 1


def test_the_limit_of_a_phase():
    pauses = Pauses(Faults(step_limit_s=1000.0, generation_limit_s=5000.0, start_limit_s=700.0))
    assert pauses.limit("training", LATER) == 1000 and pauses.limit("generation", LATER) == 5000
    pauses.note("training", 2.0), pauses.note("training", 50.0), pauses.note("training", 3.0)
    assert pauses.limit("training", LATER) == 500 and pauses.limit("training", 1) == 1000
    assert pauses.limit("checkpoint", LATER) == 3600
    pauses.note("checkpoint", 40.0)
    assert pauses.limit("checkpoint", LATER) == 400
    pauses.note("logprobs", 0.1), pauses.note("start", 1.0), pauses.note("other", 1.0)
    assert pauses.limit("logprobs", LATER) == SHORTEST_S
    assert pauses.limit("start", 0) == 700 and pauses.limit("other", LATER) == 1000  # the export is in it
    given = Pauses(Faults(hang_s=20.0))
    assert given.limit("training", 1) == given.limit("checkpoint", 9) == 20 and given.limit("start", 0) == 1800


class Ranks:
    """A node whose one rank is this process, and its launcher's watch with a test clock."""

    def __init__(self, folder, index, count):
        self.now, self.here, self.index = 0.0, Here(), index
        self.watch = Watch(folder, Node(index, count), Faults(hang_s=30.0), clock=lambda: self.now)
        self.here.open(position_file(folder, index))
        self.here.begin_step(1), self.here.enter("training")

    def look(self, seconds):
        self.now += seconds
        return self.watch.look([self.index])


def test_a_hang_of_one_node_is_none_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rft.launching.hangs.STACKS_S", 0.0)
    monkeypatch.setattr("megatron_rft.launching.hangs.NFS_S", 1e9)
    monkeypatch.setattr("megatron_rft.launching.hangs.masks", lambda pid, number: set())
    first, second = Ranks(tmp_path, 0, 2), Ranks(tmp_path, 1, 2)
    assert first.look(1) is None and second.look(1) is None
    assert first.look(60) is None  # the other node has not reported that it stands still
    second.here.move()
    assert second.look(60) is None and first.look(5) is None
    assert second.look(40) is None or first.watch.hung is None
    found = first.look(5)
    assert found is not None and "step 1, training" in found.sentence
    assert {node["ranks"][0]["rank"] for node in read_nodes(tmp_path)} == {0, 1}
    report = next(tmp_path.glob("hang_*.txt")).read_text()
    assert "rank 0 (node" in report and "rank 1 (node" in report


def test_ranks_of_two_nodes_in_the_same_collective_do_not_disagree(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rft.launching.hangs.STACKS_S", 0.0)
    monkeypatch.setattr("megatron_rft.launching.hangs.NFS_S", 1e9)
    monkeypatch.setattr("megatron_rft.launching.hangs.masks", lambda pid, number: set())
    first, second = Ranks(tmp_path, 0, 2), Ranks(tmp_path, 1, 2)
    for each in (first, second):
        each.here.add_group("0", "0 world", "0,1"), each.here.collective("0", "all_reduce"), each.here.wait(True)
        assert each.look(1) is None
    assert second.look(60) is None
    assert first.look(60).sentence.startswith("no rank has moved, and none is alone in it")


BLOCKED = """
import faulthandler, os, signal, time
os.set_blocking(1, False)
try:
    while True: os.write(1, b" ")
except BlockingIOError:
    os.set_blocking(1, True)
faulthandler.register(signal.SIGUSR2, file=1)
os.write(2, b"full")
time.sleep(600)
"""


def test_a_stack_is_waited_for_however_long_it_takes_to_write(monkeypatch):
    """The process is stopped until the third look. Its stack goes into a pipe that is full until the sixth."""
    looks = []

    def look(_seconds):
        looks.append(0)
        if len(looks) == 3:
            process.send_signal(signal.SIGCONT)
            while hangs.masks(process.pid, signal.SIGUSR2) & {"SigPnd", "ShdPnd"}:
                time.sleep(0.01)
        if len(looks) == 6:
            os.read(process.stdout.fileno(), 1 << 20)

    monkeypatch.setattr(hangs, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=look))
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr.read(4) == b"full"
        process.send_signal(signal.SIGSTOP)
        process.send_signal(signal.SIGUSR2)
        wait_until_written([process.pid])
        stack = os.read(process.stdout.fileno(), 1 << 20)
        process.kill()
    assert len(looks) >= 6 and stack.endswith(b"in <module>\n"), stack
    wait_until_written([process.pid])  # it has ended


def test_a_node_that_starts_late_leaves_the_stacks_of_the_others(tmp_path, monkeypatch):
    """The ranks of the first node have opened their files. Those of ranks that the run no longer has are not shown."""
    monkeypatch.setattr("megatron_rft.launching.hangs.masks", lambda pid, number: set())
    stacks = stack_folder(tmp_path)
    stacks.mkdir()
    for name in ("rank_0", "rank_0_engine_77", "rank_1", "rank_10"):
        (stacks / f"{name}.stack").write_text(f"the stack of {name}")
    first = Ranks(tmp_path, 0, 1)
    Watch(tmp_path, Node(1, 2), Faults())
    assert first.look(1) is None and first.look(60) is not None
    report = next(tmp_path.glob("hang_*.txt")).read_text()
    assert "---- rank 0\nthe stack of rank_0\n\n---- rank 0 engine 77\nthe stack of rank_0_engine_77\n" in report
    assert "rank_1" not in report


def test_what_a_node_wrote_long_ago_does_not_count(tmp_path):
    ranks = Ranks(tmp_path, 0, 2)
    content = {"time": time.time() - 3600, "host": "n1", "still": True, "pauses": {}, "ranks": []}
    (tmp_path / "node_1.json").write_text(json.dumps(content))
    assert ranks.look(1) is None and ranks.look(60) is None


def test_a_node_is_excluded_the_second_time(tmp_path, monkeypatch):
    for start, host, excluded in ((0, "n1", None), (1, "n2", None), (2, "n1", "n1\n"), (3, "n2", "n1,n2\n")):
        monkeypatch.setitem(os.environ, "SLURM_RESTART_COUNT", str(start))
        Job(tmp_path, tmp_path / "run").note_hang(host)
        path = tmp_path / "exclude"
        assert (path.read_text() if path.exists() else None) == excluded
