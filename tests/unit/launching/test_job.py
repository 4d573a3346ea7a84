"""The files that the nodes and starts of a queued job share, and when the job restarts."""

import threading
import time

import pytest

from megatron_rft.launching import job as module
from megatron_rft.launching.job import RETRIES, Job
from megatron_rft.launching.ranks import launch
from megatron_rft.launching.slurm import Node
from megatron_rft.utils.errors import FAILED, FINISHED, STOPPED, USER_ERROR, RunFailed


@pytest.fixture
def start(tmp_path, monkeypatch):
    """start(n): begins the job's n-th start."""

    def begin(number: int, nodes: int = 1) -> Job:
        monkeypatch.setenv("SLURM_RESTART_COUNT", str(number))
        job = Job(tmp_path / "job", tmp_path / "run", Node(0, nodes))
        job.begin()
        return job

    return begin


def save(tmp_path, name: str) -> None:
    (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)


def test_a_job_that_saves_nothing_is_given_up(start):
    for number in range(RETRIES):
        assert start(number).conclude(FAILED) == (STOPPED, "")
    status, message = start(RETRIES).conclude(FAILED)
    assert status == FAILED and "3 starts of this job in a row" in message
    with pytest.raises(RunFailed, match="not started again"):
        start(RETRIES + 1)


def test_stops_before_anything_is_saved_count_as_well(start):
    assert [start(number).conclude(STOPPED)[0] for number in range(3)] == [STOPPED, STOPPED, FAILED]


def test_starts_that_were_killed_without_a_status_count(start):
    for number in range(RETRIES + 1):
        start(number)
    with pytest.raises(RunFailed):
        start(RETRIES + 1)


def test_a_new_checkpoint_resets_the_count_of_restarts(start, tmp_path):
    for number in range(10):
        job = start(number)
        save(tmp_path, f"step_{number:06d}")
        save(tmp_path, f"step_{number:06d}.1f.partial")  # half-written: says nothing
        assert job.conclude(FAILED) == (STOPPED, "")
    for number in range(10, 12):
        assert start(number).conclude(FAILED) == (STOPPED, "")
    assert start(12).conclude(FAILED)[0] == FAILED


def test_mistakes_and_the_end_are_final(start):
    assert start(0).conclude(FINISHED) == (FINISHED, "")
    assert start(1).conclude(USER_ERROR) == (USER_ERROR, "")


def test_a_mistake_on_another_node_is_the_jobs(start, monkeypatch):
    monkeypatch.setattr(module, "STATUS_TIMEOUT_S", 300)
    job = start(0, nodes=2)
    other = Job(job.folder, job.output_dir, Node(1, 2))
    assert job.failed_elsewhere() is None
    thread = threading.Thread(target=other.conclude, args=(USER_ERROR,))
    thread.start()
    assert job.conclude(FAILED) == (USER_ERROR, "")
    thread.join()
    assert job.failed_elsewhere() == "node 1 of this job failed"


def test_nodes_wait_for_each_others_exit_status(start, monkeypatch):
    monkeypatch.setattr(module, "STATUS_TIMEOUT_S", 0.5)
    job, before = start(0, nodes=2), time.monotonic()
    assert job.conclude(STOPPED) == (STOPPED, "")
    assert time.monotonic() - before >= 0.5


class TestLauncher:
    WAIT = ["bash", "-c", "trap 'exit 75' USR1; while :; do sleep 0.05; done"]

    def test_the_stop_file_reaches_the_ranks(self, start, tmp_path):
        job = start(0)
        threading.Timer(1.5, (job.start / "stop").touch).start()
        assert launch(self.WAIT, 2, str(tmp_path / "run"), job=job) == STOPPED

    def test_a_failure_elsewhere_ends_this_nodes_ranks(self, start, tmp_path, monkeypatch, capfd):
        monkeypatch.setattr("megatron_rft.launching.ranks.EXIT_TIMEOUT_S", 0.5)
        job = start(0, nodes=2)
        (job.start / "node_1.json").write_text('{"status": 3}')
        node = Node(0, 2, "127.0.0.1", 29999)
        assert launch(["sleep", "600"], 2, str(tmp_path / "run"), node, job) == STOPPED  # a crash: worth another start
        assert "node 1 of this job failed; the ranks of this one were stopped" in capfd.readouterr().err

    def test_numbers_of_ranks_count_over_nodes(self, start, tmp_path):
        code = f'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT" >{tmp_path}/$RANK'
        assert launch(["bash", "-c", code], 2, str(tmp_path / "run"), Node(1, 3, "n1", 4000)) == 0
        assert (tmp_path / "2").read_text() == "2 0 6 n1:4000\n"
        assert (tmp_path / "3").read_text() == "3 1 6 n1:4000\n"


def test_a_node_opens_only_the_status_files_that_are_there(start, monkeypatch):
    job, opened = start(0, nodes=1024), []
    monkeypatch.setattr(module, "read_json", lambda path: opened.append(path.name) or {"status": FAILED})
    assert job.failed_elsewhere() is None and opened == []
    (job.start / "node_700.json").touch()
    assert job.failed_elsewhere() == "node 700 of this job failed" and opened == ["node_700.json"]
