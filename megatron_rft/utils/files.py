"""Atomic writes, for files that another process may read, or that a full disk must not leave incomplete; digests and
JSON lines of files; and temporary folders that outlive no process."""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_rft.utils.end_with_parent import remove_folder

TEMPORARY = "megatron_rft_????????.tmp"
START = ("MASTER_ADDR", "MASTER_PORT", "MEGATRON_RFT_LAUNCHER", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")  # of a run
SHARED = ".shared_memory"  # files with paths, one a line


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` at the end, unless the block raised.

    Creates the folder. Several threads and processes may replace one path at the same time. `sync` flushes to the
    disk first, so that the content survives a crash of the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{threading.get_native_id()}.new")
    yield new
    if sync:
        flush(new)
    new.replace(path)


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of files, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: str | bytes, sync: bool = False) -> None:
    with replacing(path, sync) as new:
        new.write_bytes(content.encode() if isinstance(content, str) else content)


def digest(path: Path) -> dict[str, Any]:
    """Return the size and the SHA-256 of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read_json(path: Path) -> Any:
    """Return the file's value; None if there is no file, or no JSON in it."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_json_lines(path: Path) -> list[Any]:
    """Return the value of each line; none if there is no file. A line that a kill left incomplete does not count."""
    values = []
    if path.is_file():
        # Not splitlines: a text may contain U+2028 or U+0085, which JSON does not escape.
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            with contextlib.suppress(ValueError):
                values.append(json.loads(line))
    return values


@contextmanager
def temporary_folder(name: str = "") -> Iterator[Path]:
    """Yield a folder beside other temporary files, and remove it at the end, with the shared memory that is recorded in
    it. Removes those of killed processes first: a process locks its own. `name`: the folder's, if it is free, also
    where the folder for temporary files is such a one."""
    root = Path(tempfile.gettempdir())
    root = root.parent if name and root.match(TEMPORARY) else root
    for other in root.glob(name or TEMPORARY):
        with contextlib.suppress(OSError), locked(other):  # OSError: it is in use, or gone
            if other.lstat().st_uid == os.getuid():
                _remove(other)
    new = Path(tempfile.mkdtemp(prefix=".megatron_rft_", suffix=".tmp", dir=root))
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # a file system without locks: nobody removes it after a kill
            stack.enter_context(locked(new))
        free = name and not os.path.lexists(root / name)
        folder = new.rename(root / (name if free else new.name.removeprefix(".")))  # locked before anybody finds it
        stack.callback(_remove, folder)
        yield folder


def record_shared_memory(paths: set[str]) -> None:
    """Where the folder for temporary files is a `temporary_folder`: have these files removed with it, for those of
    processes that are killed."""
    folder = Path(tempfile.gettempdir())
    if folder.match(TEMPORARY):
        (folder / f"{os.getpid()}{SHARED}").write_text("\n".join(paths))


def _remove(folder: Path) -> None:
    for record in folder.glob(f"*{SHARED}"):
        for path in record.read_text().splitlines():
            with contextlib.suppress(OSError):
                os.unlink(path)
    remove_folder(str(folder))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Raises OSError where another process holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def one_of_node(what: str) -> Iterator[bool]:
    """Yield whether the hub should be asked for `what`: not if another rank of this start of the run, on this node, has
    asked. The ranks of a node come here one after the other; a process that is no rank asks."""
    if "LOCAL_RANK" not in os.environ:
        yield True
        return
    name = hashlib.sha256("/".join([what, *(os.environ.get(each, "") for each in START)]).encode()).hexdigest()[:16]
    with open(Path(tempfile.gettempdir(), f"megatron_rft_{os.getuid()}_{name}.asked"), "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        try:
            yield not file.read()
        finally:  # after an error the others need not ask either
            file.write("asked")
