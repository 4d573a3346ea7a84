"""Rows of a data set as dictionaries: a file, a folder of shards, a name on the Hugging Face hub, or the generated
arithmetic; through an adapter where one is named. No tokenizer, no torch.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from megatron_rft.config.datasets import ARITHMETIC, HUB, SAVED, TABLES, TEXTS
from megatron_rft.data import arithmetic, hub, tables
from megatron_rft.data.adapters import adapt
from megatron_rft.data.fields import Row
from megatron_rft.data.selection import Choice, kind_of, select
from megatron_rft.data.text_rows import csv_file, json_file, json_lines, text_lines, tsv_file
from megatron_rft.utils.errors import DataError

READERS = {
    **{SAVED: tables.saved, ".parquet": tables.parquet, ".arrow": tables.arrow},
    **{".jsonl": json_lines, ".ndjson": json_lines, ".json": json_file},
    **{".csv": csv_file, ".tsv": tsv_file, ".txt": text_lines},
}
POINTER = b"version https://git-lfs.github.com/spec/"
assert set(READERS) == {SAVED, *TABLES, *TEXTS}


class Rows(list[Row]):
    """The first rows of files."""

    def __init__(self, rows: Iterable[Row], files: list[Path]):
        super().__init__(rows)
        self.files = files

    def place(self, index: int) -> str:
        """The file and line of a row, for an error. It reads the file again: millions of places would take memory."""
        places = (place for file in self.files for place, _ in _read(file))
        return next(islice(places, index, None))


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
    """The first `limit` rows. The arguments are those of a recipe's data source; `part` is its key there.

    Raises:
        DataError: a file or a row cannot be read; the message names both.
    """
    if str(path) == ARITHMETIC:
        return arithmetic.rows(split or part, limit)
    found = find_files(str(path), Choice(part, split, subset, files))
    rows = Rows(islice((row for file in found for row in _rows(file, adapter)), limit), found)
    if not rows:
        raise DataError(f"{path}: the data set is empty")
    return rows


def find_files(path: str, choice: Choice) -> list[Path]:
    """The files to read, in order; for a hub name they are downloaded."""
    if path.startswith(HUB):
        return hub.download(path, choice)
    place = Path(path).expanduser()
    if place.is_dir():
        names = (str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())
        return [place / name for name in select(names, choice, path)]
    return [place]


def _read(file: Path) -> Iterator[tuple[str, Row]]:
    for each in file.parent.glob("*.arrow") if file.name == SAVED else [file]:
        with each.open("rb") as opened:
            if opened.read(len(POINTER)) == POINTER:
                raise DataError(f"{each} is a pointer of Git LFS, not the file: run `git lfs pull` in its folder")
    yield from READERS[kind_of(file.name)](file)


def _rows(file: Path, adapter: str | None) -> Iterator[Row]:
    rows = _read(file)
    return (row for _, row in rows) if adapter is None else adapt(rows, adapter, file)
