"""Atomic writes, for files that another process may be reading, or that a full disk must not leave half-written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[Path]:
    """A temporary path beside `path` to write to. It is renamed to `path` at the end, unless the block raised.

    Several processes may do this to one path at the same time. Makes the folder. `sync` flushes to the disk first, so
    that the content survives a crash of the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    yield new
    if sync:
        with new.open("rb") as file:
            os.fsync(file.fileno())
    new.replace(path)


def write_atomically(path: Path, content: str | bytes, sync: bool = False) -> None:
    with replacing(path, sync) as new:
        new.write_bytes(content.encode() if isinstance(content, str) else content)
