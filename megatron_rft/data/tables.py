"""Rows of parquet and Arrow files, a batch in memory at a time. A folder of `save_to_disk` holds Arrow files.

The rows are Arrow's own values: images and audio stay bytes, no feature of `datasets` is decoded.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rft.data.fields import Row
from megatron_rft.utils.errors import DataError, first_line

KINDS = {".parquet": "a parquet", ".arrow": "an Arrow"}


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
        problem = f"is broken after row {number}" if number else f"not {KINDS[file.suffix]} file, or a broken one"
        raise DataError(f"{file}: {problem} ({first_line(error)})") from None


def _rows(file: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    if file.suffix == ".parquet":
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1000)
    else:
        source = pyarrow.memory_map(str(file))
        try:
            batches = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:  # the other format of the same suffix
            opened = pyarrow.ipc.open_file(source)
            batches = map(opened.get_batch, range(opened.num_record_batches))
    for batch in batches:
        names, fields = batch.schema.names, [_in_microseconds(field) for field in batch.schema]
        if len(set(names)) < len(names):
            raise ValueError(f"two columns have one name: {', '.join(names)}")
        yield from batch.cast(pyarrow.schema(fields), safe=False).to_pylist()


def _in_microseconds(field: Any) -> Any:
    """A field of Arrow's that Python has a type for: pyarrow reads nanoseconds by pandas alone."""
    import pyarrow

    kind = field.type
    if pyarrow.types.is_timestamp(kind) and kind.unit == "ns":
        return field.with_type(pyarrow.timestamp("us", kind.tz))
    return field.with_type(pyarrow.duration("us")) if kind == pyarrow.duration("ns") else field
