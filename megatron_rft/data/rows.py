"""Rows of a data set as dictionaries: a file, a folder of shards, a name on the Hugging Face hub, or a function of the
user; through an adapter where one is named. No tokenizer, no torch.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path

from megatron_rft.config.datasets import CODE, HUB, READ, SAVED, TABLES, TEXTS, split_parts, suffix_of
from megatron_rft.data import hub
from megatron_rft.data.adapters import adapt
from megatron_rft.data.fields import File, Row, Streamed
from megatron_rft.data.selection import README, Choice, kind_of, select
from megatron_rft.data.tables import table
from megatron_rft.data.text_rows import csv_file, json_file, json_lines, text_lines
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError, DataError, first_line

READERS = {
    **{SAVED: partial(table, kind="saved"), ".parquet": partial(table, kind="parquet")},
    **{".arrow": partial(table, kind="arrow"), ".tsv": partial(csv_file, delimiter="\t")},
    **{".jsonl": json_lines, ".ndjson": json_lines, ".json": json_file},
    **{".csv": csv_file, ".txt": text_lines},
}
POINTER = b"version https://git-lfs.github.com/spec/"
assert set(READERS) == {SAVED, *TABLES, *TEXTS}


class Rows(list[Row]):
    """The first rows of slices of files."""

    def __init__(self, rows: Iterable[Row], slices: list[tuple[list[File], int, int | None]]):
        super().__init__(rows)
        self.slices = slices

    def place(self, index: int) -> str:
        """The file and line of a row, for an error. It reads the file again: millions of places would take memory."""
        places = (islice((place for file in files for place, _ in _read(file)), *cut) for files, *cut in self.slices)
        return next(islice(chain.from_iterable(places), index, None))


def load_rows(
    path: str | Path,
    split: str | None = None,
    limit: int | None = None,
    *,
    adapter: str | None = None,
    subset: str | None = None,
    files: str | None = None,
    streaming: bool = False,
    part: str = "train",
) -> list[Row]:
    """The first `limit` rows. The arguments are those of a recipe's data source; `part` is its key there.

    Raises:
        DataError: a file or a row cannot be read; the message names both.
    """
    read, slices = [], []
    for name, cut in split_parts(split) if split else [(None, None)]:
        if CODE.fullmatch(str(path)):
            found, every = [], _returned(str(path), name or part, None if cut else limit)
        else:
            found = find_files(str(path), Choice(part, name, subset, files), streaming)
            every = (row for file in found for _, row in _read(file))
            if adapter:
                every = chain.from_iterable(adapt(_read(file), adapter, file) for file in found)
        rows, start, stop = _sliced(every, cut, f"{path}: {split}")
        read.append(rows)
        slices.append((found, start, stop))
    rows = Rows(islice(chain.from_iterable(read), limit), slices)
    if not rows:
        raise DataError(f"{path}: the data set is empty" + (f" ({split})" if split else ""))
    return rows


def _returned(code: str, split: str, limit: int | None) -> Iterator[Row]:
    """The rows that the user's function returns."""
    function = user_code.load(code, "path")
    try:
        for row in function(split, limit):
            if not isinstance(row, dict):
                raise TypeError(f"a row is a dict with named fields, not {row!r:.60}")
            yield row
    except (ConfigError, DataError):
        raise
    except Exception as error:
        place = user_code.place(error)
        raise DataError(f"{code}(split, limit): {type(error).__name__}: {first_line(error)} ({place})") from None


def _sliced(rows: Iterator[Row], cut: str | None, source: str) -> tuple[Iterable[Row], int, int | None]:
    """The rows of a slice such as "[:80%]", by the rules of `datasets`, and its bounds."""
    if cut is None:
        return rows, 0, None
    from datasets import ReadInstruction

    every = list(rows)
    try:
        (bounds,) = ReadInstruction.from_spec(f"rows{cut}").to_absolute({"rows": len(every)})
    except (AssertionError, ValueError) as error:
        raise DataError(f"{source}: {first_line(error)}") from None
    return every[bounds.from_ : bounds.to], bounds.from_, bounds.to


def find_files(path: str, choice: Choice, streaming: bool = False) -> list[File]:
    """The files to read, in order; for a hub name they are downloaded, or (streaming) named by their addresses."""
    if path.startswith(HUB):
        return hub.addresses(path, choice) if streaming else hub.download(path, choice)
    place = Path(path).expanduser()
    if place.is_dir():
        names = (str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())
        return [place / name for name in select(names, choice, path, place / README)]
    return [place]


def _read(file: File) -> Iterator[tuple[str, Row]]:
    if suffix_of(file.name) is None:
        raise DataError(f"{file} is not a {READ} file")
    here = file.parent.glob("*.arrow") if file.name == SAVED else [file]
    for each in [] if isinstance(file, Streamed) else here:
        with each.open("rb") as opened:
            if opened.read(len(POINTER)) == POINTER:
                raise DataError(f"{each} is a pointer of Git LFS, not the file: run `git lfs pull` in its folder")
    yield from READERS[kind_of(file.name)](file)
