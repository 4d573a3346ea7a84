"""The lock of a run's folder, held by processes that live, ended, or are on another machine."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace

import pytest

from megatron_rft.utils import run_lock
from megatron_rft.utils.errors import ConfigError
from megatron_rft.utils.files import write_atomically
from megatron_rft.utils.run_lock import held, lock_file, refuse_others, this_process


def lock(folder, **changed) -> str:
    content = json.dumps(asdict(replace(this_process(), **changed)))
    write_atomically(lock_file(folder), content)
    return content


def test_a_lock_is_there_while_it_is_held(tmp_path):
    with held(tmp_path):
        assert run_lock.holder(tmp_path) == replace(this_process(), since=run_lock.holder(tmp_path).since)
    assert not lock_file(tmp_path).exists()


def test_a_live_process_keeps_its_folder(tmp_path):
    content = lock(tmp_path, host="here", since=0.0, job="77")
    words = rf"{tmp_path}: process {os.getpid()} on here, Slurm job 77, since 19\d\d-\d\d-\d\d .*, trains there. Wait"
    with pytest.raises(ConfigError, match=words), held(tmp_path):
        pass
    assert lock_file(tmp_path).read_text() == content
    assert os.listdir(tmp_path / "launch") == ["lock.json"]


@pytest.mark.parametrize("reused", [False, True])
def test_the_lock_of_a_process_that_ended_is_taken_over(tmp_path, capsys, reused):
    """`reused`: another process has its pid now."""
    with subprocess.Popen(["true"]) as process:
        process.wait()
    pid = os.getpid() if reused else process.pid
    lock(tmp_path, pid=pid, started="12")
    with held(tmp_path):
        assert run_lock.holder(tmp_path).started == this_process().started
    assert f"warning: process {pid} on" in (told := capsys.readouterr().out)
    assert "has ended without unlocking" in told and "its lock is taken over" in told


def test_a_process_of_another_machine_lives_while_its_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: lock(tmp_path, machine="another", since=0.0))
    lock(tmp_path, machine="another", since=0.0)
    with pytest.raises(ConfigError, match="trains there"):
        refuse_others(tmp_path)


@pytest.mark.parametrize("age", [0.0, 100.0])
def test_a_silent_process_of_another_machine_is_dead_after_a_while(tmp_path, monkeypatch, age):
    """A file that is old enough is not waited for, whatever this machine's clock says."""
    monkeypatch.setattr(run_lock, "EXPIRES_S", 1.5 if age == 0 else 60.0)
    lock(tmp_path, machine="another")
    now = time.time()
    os.utime(lock_file(tmp_path), (now - age, now - age))
    assert "its lock is taken over" in refuse_others(tmp_path)
    assert time.time() - now < 30 and (age or time.time() - now > 1)
    assert os.listdir(tmp_path / "launch") == ["lock.json"]


def test_other_nodes_of_the_job_may_start(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    lock(tmp_path)
    assert refuse_others(tmp_path, same_job=True) == ""
    lock(tmp_path, job="6")
    with pytest.raises(ConfigError, match="Slurm job 6"):
        refuse_others(tmp_path, same_job=True)


def test_other_nodes_of_a_job_that_takes_a_lock_over_may_start(tmp_path, monkeypatch):
    """The launcher of the first node has done so while another one still waited whether the old holder lives."""
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: lock(tmp_path, machine="a third", since=0.0))
    lock(tmp_path, machine="another", job="5")
    assert refuse_others(tmp_path, same_job=True) == ""
    lock(tmp_path, machine="another", job="5")
    with pytest.raises(ConfigError, match="Slurm job 6, .* trains there"):
        refuse_others(tmp_path)


def test_who_finds_another_holder_ends(tmp_path):
    """As after two starts at the same moment."""
    script = (
        "import sys, time; from pathlib import Path; from megatron_rft.utils import run_lock\n"
        "run_lock.BEAT_S = 0.1\n"
        "with run_lock.held(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command, pipe = [sys.executable, "-c", script, str(tmp_path)], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        assert process.stdout.readline() == "held\n"
        content = lock(tmp_path, pid=1)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if lock_file(tmp_path).read_text() != content:  # by a beat that had read the file before
                write_atomically(lock_file(tmp_path), content)
            time.sleep(0.05)
        assert process.poll() == 3
        assert "was taken over by process 1 on" in process.stderr.read()
    assert lock_file(tmp_path).read_text() == content
