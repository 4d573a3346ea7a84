"""Atomic writes, for files that another process may read, or that a full disk must not leave incomplete."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, sync: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` at the end, unless the block raised.

    Creates the folder. Several processes may replace one path at the same time. `sync` flushes to the disk first, so
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
