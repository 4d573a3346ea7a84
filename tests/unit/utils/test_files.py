"""Temporary folders that outlive no process, and files that several threads write."""

import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from megatron_rft.utils.files import read_json, record_shared_memory, replacing, temporary_folder

HOLD = """
from megatron_rft.utils.files import temporary_folder
with temporary_folder() as folder:
    print(folder, flush=True)
    input()
"""


def hold(root: Path) -> tuple[subprocess.Popen, Path]:
    """A process and its temporary folder."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(root)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLD], env=environment, text=True, **pipes)
    return process, Path(process.stdout.readline().strip())


def test_a_killed_process_leaves_one_until_the_next_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "megatron_rft_notes").mkdir()
    (killed, left), (alive, held) = hold(tmp_path), hold(tmp_path)
    with killed, alive:
        (left / "a socket").touch()
        shared = tmp_path / "shared memory"
        shared.touch()
        with monkeypatch.context() as there:
            there.setattr(tempfile, "tempdir", str(left))
            record_shared_memory({str(shared), str(tmp_path / "what the process itself has removed")})
        killed.kill()
        killed.wait()
        assert left.parent == held.parent == tmp_path and left.is_dir() and shared.exists()
        with temporary_folder() as own:
            assert {path for path in tmp_path.iterdir() if path.suffix} == {held, own}
        alive.communicate("\n")
    record_shared_memory({"/dev/shm/of_a_run_without_such_a_folder"})
    assert [path.name for path in tmp_path.iterdir()] == ["megatron_rft_notes"]


def test_a_named_folder_is_empty_and_nobody_elses(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "episodes").mkdir()
    (tmp_path / "episodes/left").touch()  # by a killed process
    with temporary_folder("episodes") as own, temporary_folder("episodes") as other:
        assert own == tmp_path / "episodes" and other.parent == tmp_path and other != own
        for folder in (own, other):
            assert not [*folder.iterdir()] and folder.stat().st_mode & 0o777 == 0o700
        (own / "left").touch()
    left = [path for path in tmp_path.iterdir() if path.is_dir() and [*path.iterdir()]]
    assert not own.exists() and not other.exists() and not left
    (tmp_path / "another users").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "another users")
    with temporary_folder("link") as folder:
        assert folder.resolve().parent == tmp_path and folder.name != "another users" and not folder.is_symlink()
    with temporary_folder() as temporary, monkeypatch.context() as there:
        there.setattr(tempfile, "tempdir", str(temporary))
        with temporary_folder("episodes") as folder:
            assert folder == tmp_path / "episodes", "the same in each start of a run"


def test_json_that_is_absent_or_broken_has_no_value(tmp_path):
    path = tmp_path / "node_0.json"
    assert read_json(path) is None
    path.write_text('{"still": tr')
    assert read_json(path) is None
    path.write_text('{"still": true}')
    assert read_json(path) == {"still": True}


def test_threads_write_one_file_at_the_same_time(tmp_path):
    """As episodes do that show the same image."""
    both = Barrier(2)

    def write(text: str) -> None:
        with replacing(tmp_path / "file") as new:
            new.write_text(text)
            both.wait(60)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(write, ("one", "two")))
    assert (tmp_path / "file").read_text() in ("one", "two") and len(list(tmp_path.iterdir())) == 1
