"""Rows of parquet and Arrow files and of folders of `save_to_disk`, read by `datasets`; a batch in memory at a time,
and no converted copy on the disk.

Images, audio and video are not decoded: a value is `{"bytes": ..., "path": ...}`, one of which may be None. Parquet and
Arrow give every object of a column the same keys, filled with None. These are left out, as they were before.
"""

from collections.abc import Iterator
from glob import escape
from pathlib import Path
from typing import Any

from megatron_rft.data.fields import File, Row
from megatron_rft.utils.errors import DataError, first_line
from megatron_rft.utils.files import temporary_folder

KINDS = {"parquet": "a parquet file", "arrow": "an Arrow file", "saved": "a folder of save_to_disk"}
BATCH = 1000


def table(file: File, kind: str) -> Iterator[tuple[str, Row]]:
    """(place, row) of each row of a file of a kind of KINDS. "saved": the folder's state.json, which names its files;
    others are caches of `map` and `filter`.

    Raises:
        DataError: the file is of another kind, truncated or corrupt.
    """
    file, number = file.parent if kind == "saved" else file, 0
    try:
        with temporary_folder() as cache:  # of `datasets`, for locks
            for row in _rows(file, kind, cache):
                number += 1
                yield f"{file}, row {number}", row
    except Exception as error:  # datasets, pyarrow and the file system have no common class for a broken file
        problem = f"is broken after row {number}" if number else f"cannot be read as {KINDS[kind]}"
        raise DataError(f"{file}: {problem} ({first_line(error)})") from None


def _rows(file: File, kind: str, cache: Path) -> Iterator[Row]:
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # its errors are logged, too
    if kind == "saved":
        table = datasets.Dataset.load_from_disk(str(file))
    else:
        options = {"data_files": escape(str(file)), "split": "train", "streaming": True, "cache_dir": str(cache)}
        table = datasets.load_dataset(kind, **options).reshard()  # a group of rows at a time: none is read ahead
    features = table.features  # a copy at each access
    for batch in table.with_format("arrow").iter(BATCH):
        yield from (_value(features, row, keep_none=True) for row in batch.to_pylist())


def _value(feature: Any, stored: Any, keep_none: bool = False) -> Any:
    """A value as it was written, from Arrow's, by its feature (of `datasets`). The columns of a row stay if they are
    None."""
    if isinstance(feature, dict):
        kept = {name: x for name, x in stored.items() if keep_none or x is not None}
        return {name: x if x is None else _value(feature[name], x) for name, x in kept.items()}
    if hasattr(feature, "feature"):  # a list
        return [x if x is None else _value(feature.feature, x) for x in stored]
    return feature.decode_example(stored) if type(feature).__name__ == "Json" else stored
