"""Rows of a data set as dictionaries: a file, a folder of shards, a name on the Hugging Face hub, or the generated
arithmetic; through an adapter where one is named. No tokenizer, no torch.
"""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rft.config.datasets import ARITHMETIC, HUB, SUFFIXES
from megatron_rft.data import arithmetic, hub
from megatron_rft.data.adapters import adapt
from megatron_rft.data.fields import Row
from megatron_rft.data.selection import Choice, select
from megatron_rft.utils.errors import DataError

Placed = tuple[str, Row]  # where a row stands, for errors


def load_rows(
    path: str | Path,
    split: str | None = None,
    limit: int | None = None,
    *,
    adapter: str | None = None,
    subset: str | None = None,
    files: str | None = None,
    part: str = "train",
) -> list[Row]:
    """The first `limit` rows. The arguments are those of a recipe's data source; `part` is where it stands there."""
    if str(path) == ARITHMETIC:
        return arithmetic.rows(split or part, limit)
    found = find_files(str(path), Choice(part, split, subset, files))
    rows: Iterator[Any] = (placed for file in found for placed in _placed(file, adapter))
    rows = list(islice(rows, limit))
    if not rows:
        raise DataError(f"{path}: the data set is empty")
    return rows


def find_files(path: str, choice: Choice) -> list[Path]:
    """The files to read, in order; those of a hub name are downloaded."""
    if path.startswith(HUB):
        return hub.download(path, choice)
    place = Path(path).expanduser()
    if place.is_dir():
        names = (str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())
        return [place / name for name in select(names, choice, path)]
    if not place.is_file():
        raise DataError(
            f"{path}: no such file or folder (a data set is a {', '.join(SUFFIXES)} file, or a folder of them)"
        )
    if place.suffix not in READERS:
        raise DataError(f"{path}: a data set is a {', '.join(SUFFIXES)} file, a folder of them, or `arithmetic`")
    return [place]


def _placed(file: Path, adapter: str | None) -> Iterator[Row]:
    rows = READERS[file.suffix](file)
    return (row for _, row in rows) if adapter is None else adapt(rows, adapter, file)


def _json_lines(file: Path) -> Iterator[Placed]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{file}:{number}", _row(line, f"{file}:{number}")


def _row(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg}, column {error.colno}): {line.strip()[:60]}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row is an object with named fields, not {type(row).__name__}: {line.strip()[:60]}")
    return row


def _json(file: Path) -> Iterator[Placed]:
    """One list of objects, or (as some published .json files are) one object per line."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _json_lines(file)
            return
        raise DataError(f"{file}:{error.lineno}: not JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{file}: a .json data set is a list of objects, or one object per line")
    yield from ((f"{file}, row {number}", row) for number, row in enumerate(rows, start=1))


def _parquet(file: Path) -> Iterator[Placed]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a parquet file ({error})") from None
    yield from _numbered(file, table.iter_batches())


def _arrow(file: Path) -> Iterator[Placed]:
    """As the `datasets` library saves them: an Arrow stream, or an Arrow file."""
    import pyarrow

    with pyarrow.memory_map(str(file)) as memory:
        try:
            yield from _numbered(file, pyarrow.ipc.open_stream(memory))
            return
        except pyarrow.ArrowInvalid:
            memory.seek(0)
        try:
            table = pyarrow.ipc.open_file(memory)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{file}: not an Arrow file ({error})") from None
        yield from _numbered(file, (table.get_batch(i) for i in range(table.num_record_batches)))


def _numbered(file: Path, batches: Any) -> Iterator[Placed]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", row


READERS = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet, ".arrow": _arrow}
assert set(READERS) == set(SUFFIXES)
