"""Rows of parquet and Arrow files, as `datasets` reads them. They are streamed: memory holds a batch of rows at a time,
and no converted copy is written into its cache. A folder of `save_to_disk` is Arrow files.

The rows are Arrow's own values: images and audio stay bytes, no feature of `datasets` is decoded.
"""

from collections.abc import Iterator
from contextlib import suppress
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_rft.data.fields import Row
from megatron_rft.utils.errors import DataError, first_line

KINDS = {".parquet": "a parquet", ".arrow": "an Arrow"}
BATCH = 1000  # rows


def table(file: Path) -> Iterator[tuple[str, Row]]:
    """(place, row) of each row.

    Raises:
        DataError: the file is of another kind, truncated or corrupt.
    """
    number = 0
    try:
        for row in _rows(file):
            number += 1
            yield f"{file}, row {number}", row
    except Exception as error:  # pyarrow and the file system have no common class for a broken file
        readable = _readable(file)
        problem = f"is broken after row {readable}" if readable else f"not {KINDS[file.suffix]} file, or a broken one"
        raise DataError(f"{file}: {problem} ({first_line(error)})") from None


def _readable(file: Path) -> int:
    """Count the rows before the fault: pyarrow reads row groups ahead, and may find it before it has given them."""
    number = 0
    with suppress(Exception):
        for _ in _rows(file, one_group_at_a_time=True):
            number += 1
    return number


def _rows(file: Path, one_group_at_a_time: bool = False) -> Iterator[Row]:
    import datasets  # the import takes seconds

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # our error says what it would log
    kind = file.suffix.removeprefix(".")
    options = {"batch_size": BATCH} if kind == "parquet" else {}
    with TemporaryDirectory() as locks:  # the only thing that streaming writes
        rows = datasets.load_dataset(
            kind, data_files=escape(str(file.absolute())), split="train", streaming=True, cache_dir=locks, **options
        )
    rows = rows.reshard() if one_group_at_a_time else rows
    for batch in rows.with_format("arrow").iter(BATCH):
        yield from batch.to_pylist()
