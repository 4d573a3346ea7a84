"""Reads rows of text files (JSON, CSV) strictly: values are not converted, and an error names the line.

`datasets` is not used for text because it infers one schema for a whole file: it fills a field that some rows lack with
None, reads 1 beside 1.5 as 1.0, "025" in a CSV file as 25, a long integer as a float and text that looks like a date as
a datetime, and turns a field of several types into JSON text. Its errors count rows within a block, not lines of the
file, and a CSV row with a cell too many shifts the columns without an error.
"""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_rft.data.fields import File, Row, check_escapes
from megatron_rft.utils.errors import DataError

WHITESPACE = re.compile(r"[ \t\r\n]*")
COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\3\4": "zip"}


class _Duplicate(ValueError):
    """A duplicate key in an object."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Duplicate(next(name for name in names if names.count(name) > 1))
    return content


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def json_lines(file: File) -> Iterator[tuple[str, Row]]:
    """(place, row) of each line that is not blank."""
    for number, line in enumerate(_lines(file), start=1):
        line = line.rstrip(" \t\r\n")
        if not line:
            continue
        place = f"{file}:{number}"
        row, end = _decoded(line, _skip(line, 0), file, place, number)
        if end < len(line):
            raise _not_json(json.JSONDecodeError("Extra data", line, _skip(line, end)), file, number)
        if not isinstance(row, dict):
            what = f"{type(row).__name__}: {line[:60]}"
            raise DataError(f"{place}: a row is an object with named fields, not {what}")
        yield place, row


def text_lines(file: File) -> Iterator[tuple[str, Row]]:
    """(place, {"text": line}) of each line."""
    for number, line in enumerate(_lines(file), start=1):
        yield f"{file}:{number}", {"text": line.rstrip("\r\n")}


def csv_file(file: File, delimiter: str = ",") -> Iterator[tuple[str, Row]]:
    """(place, row) of each row under the header. Every cell is text: an empty one is "", and "NA" is not null."""
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(_lines(file, newline=""), delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
        if len(set(names)) < len(names):
            raise DataError(f"{file}:1: two columns have one name: {', '.join(names)}")
        for cells in filter(None, reader):
            place = f"{file}:{reader.line_num}"
            if len(cells) != len(names):
                raise DataError(f"{place}: {len(cells)} cells under {len(names)} columns ({', '.join(names)})")
            yield place, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{file}:{reader.line_num}: not CSV ({error})") from None


def json_file(file: File) -> Iterator[tuple[str, Row]]:
    """(place, row) of one list of objects, or (as some published .json files are) of one object per line."""
    text = "".join(_lines(file))
    start = _skip(text, 0)
    if text.startswith("[", start):
        yield from _listed(text, start + 1, file)
    elif start < len(text):
        value, end = _decoded(text, start, file, f"{file}:1")
        if _skip(text, end) == len(text):
            raise _no_rows(file, value)  # one value is the whole file
        yield from json_lines(file)


def _listed(text: str, at: int, file: File) -> Iterator[tuple[str, Row]]:
    """The objects of a JSON list, one at a time, so that an error names its row. `at`: the position after the
    bracket."""
    number, more = 0, not text.startswith("]", _skip(text, at))
    while more:
        number += 1
        row, end = _decoded(text, _skip(text, at), file, f"{file}, row {number}")
        if not isinstance(row, dict):
            raise _no_rows(file, row)
        yield f"{file}, row {number}", row
        end = _skip(text, end)
        if not text.startswith((",", "]"), end):
            raise _not_json(json.JSONDecodeError("Expecting ',' delimiter", text, end), file)
        more, at = text[end] == ",", end + 1
    if number and _skip(text, at) < len(text):
        raise _not_json(json.JSONDecodeError("Extra data", text, _skip(text, at)), file)


def _decoded(text: str, at: int, file: File, place: str, line: int = 1) -> tuple[Any, int]:
    """The JSON value at a position of `text`, which begins at `line` of the file, and the position after it."""
    try:
        value, end = DECODER.raw_decode(text, at)
    except json.JSONDecodeError as error:
        raise _not_json(error, file, line) from None
    except _Duplicate as error:
        raise DataError(f"{place}: one object has the key {str(error)!r} twice; which one counts is not said") from None
    except RecursionError:
        raise DataError(f"{place}: its brackets are nested more deeply than can be read") from None
    except ValueError:  # int() of too long a text
        limit = sys.get_int_max_str_digits()
        raise DataError(f"{place}: an integer has more than {limit} digits: write it as text, in quotes") from None
    check_escapes(text[at:end], value, place)
    return value, end


def _skip(text: str, at: int) -> int:
    return WHITESPACE.match(text, at).end()


def _not_json(error: json.JSONDecodeError, file: File, line: int = 1) -> DataError:
    shown = error.doc.splitlines()[error.lineno - 1 : error.lineno] or [""]
    seen = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in shown[0].strip()[:60])
    return DataError(f"{file}:{line + error.lineno - 1}: not JSON ({error.msg}, column {error.colno}): {seen}")


def _no_rows(file: File, value: Any) -> DataError:
    lists = [name for name, x in value.items() if isinstance(x, list)] if isinstance(value, dict) else []
    what = f"; this one is an object that holds lists, {', '.join(map(repr, lists))}: save the rows alone"
    return DataError(f"{file}: a .json data set is a list of objects, or one object per line{what if lists else ''}")


def _lines(file: File, newline: str | None = None) -> Iterator[str]:
    """Refuses bytes that are not UTF-8, and UTF-16 without a byte order mark, whose first letter has a byte of 0."""
    # Bytes that are not UTF-8 become lone surrogates.
    with _bytes(file) as data, gzip.open(data) if file.name.lower().endswith(".gz") else data as plain:
        try:
            lines = io.TextIOWrapper(plain, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
            for number, line in enumerate(lines, start=1):
                _check_utf_8(line, file, number)
                yield line
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataError(f"{file}: it is not a gzip file, or a broken one ({error})") from None


def _bytes(file: File) -> Any:
    if isinstance(file, Path):
        return file.open("rb")
    from huggingface_hub import HfFileSystem

    return HfFileSystem().open(str(file))


def _check_utf_8(line: str, file: File, number: int) -> None:
    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise _not_utf_8(line, error.start, file, number) from None
    if number == 1 and "\0" in line[:2]:
        raise _not_utf_8(line, line.index("\0"), file, number)


def _not_utf_8(text: str, at: int, file: File, line: int) -> DataError:
    """The error about the character at a position of a line."""
    start = text[:8].encode(errors="surrogateescape") if line == 1 else b""
    for mark, program in COMPRESSED.items():
        if start.startswith(mark):
            return DataError(f"{file}: it is not text but compressed by {program}: unpack it (gzip: or name it .gz)")
    little, big = start[1:2] == b"\0", start[:1] == b"\0"
    marked = start[:1] in (b"\xfe", b"\xff")
    guess = "UTF-16" if marked else "UTF-16LE" if little else "UTF-16BE" if big else "LATIN1"
    byte = text[at].encode(errors="surrogateescape")[0]
    return DataError(
        f"{file}:{line}: not UTF-8 text (byte 0x{byte:02x}): save it as UTF-8, for example by `iconv -f {guess} "
        f"-t UTF-8` if it is {guess}"
    )
