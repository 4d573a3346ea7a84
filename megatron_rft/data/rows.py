"""Rows of a data set as dictionaries: .jsonl, .json, .parquet, or the generated arithmetic. No tokenizer, no torch."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from megatron_rft.data import arithmetic
from megatron_rft.errors import DataError

Row = dict[str, Any]


def load_rows(path: str | Path, split: str | None = None, limit: int | None = None) -> list[Row]:
    """The first `limit` rows of a file, or of a split (default: train) of the path "arithmetic"."""
    if str(path) == "arithmetic":
        return arithmetic.rows(split or "train", limit)
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{path}: no such file (a .jsonl, .json or .parquet file, or `arithmetic`)")
    if file.suffix not in READERS:
        raise DataError(f"{path}: a data set is a {', '.join(READERS)} file, or `arithmetic`")
    rows = list(islice(READERS[file.suffix](file), limit))
    if not rows:
        raise DataError(f"{path}: the data set is empty")
    return rows


def _json_lines(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _row(line, f"{file}:{number}")


def _row(line: str, place: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not JSON ({error.msg}, column {error.colno}): {line.strip()[:60]}") from None
    if not isinstance(row, dict):
        raise DataError(f"{place}: a row is an object with named fields, not {type(row).__name__}: {line.strip()[:60]}")
    return row


def _json(file: Path) -> Iterator[Row]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise DataError(f"{file}:{error.lineno}: not JSON ({error.msg}, column {error.colno})") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{file}: a .json data set is a list of objects (one object per line is .jsonl)")
    yield from rows


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{file}: not a parquet file ({error})") from None
    for batch in table.iter_batches():
        yield from batch.to_pylist()


READERS = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}
