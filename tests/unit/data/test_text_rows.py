"""Unusual and damaged text files: which are read, and which are refused with file and line."""

import bz2
import gzip
import json
import lzma
import sys

import pytest

from megatron_rft.data.rows import load_rows
from megatron_rft.utils.errors import DataError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
GOOD = b'{"q": "1+1?", "a": 2}\n'


def test_types_are_those_of_the_file(tmp_path):
    """Rows share no schema: no added fields, no 1.0 for 1, no dates, no mixed types as text."""
    rows = [{"a": 1}, {"a": 1.5, "b": "2024-01-01T00:00:00"}, {"a": "x"}, {"a": {"y": None}}, {"a": 10**30}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.json").write_text(json.dumps(rows))
    for name in ("a.jsonl", "b.json"):
        found = load_rows(tmp_path / name)
        assert found == rows and [type(row["a"]) for row in found] == [int, float, str, dict, int]


@pytest.mark.parametrize(
    ("name", "data", "rows"),
    [
        ("a.jsonl", b"\xef\xbb\xbf" + GOOD, [{"q": "1+1?", "a": 2}]),  # a byte order mark
        ("a.json", b'\xef\xbb\xbf [{"a": 1} , {"a": 2}] \n', [{"a": 1}, {"a": 2}]),
        (
            "a.csv",
            b'\xef\xbb\xbfq,a\r\n"x, ""y""\nz",025\r\n\r\nNA,\r\n',
            [{"q": 'x, "y"\nz', "a": "025"}, {"q": "NA", "a": ""}],
        ),
        ("a.JSONL", GOOD, [{"q": "1+1?", "a": 2}]),
        ("a.ndjson", GOOD, [{"q": "1+1?", "a": 2}]),
        ("a.jsonl.gz", gzip.compress(GOOD, mtime=0), [{"q": "1+1?", "a": 2}]),
        ("a.json.gz", gzip.compress(b'[{"a": 1}]', mtime=0), [{"a": 1}]),
        ("a.tsv", b"q\ta\n1,5\t025\n", [{"q": "1,5", "a": "025"}]),
        ("a.txt", b"1+1?\r\n\n 2+2? ", [{"text": "1+1?"}, {"text": ""}, {"text": " 2+2? "}]),
        ("a.jsonl", GOOD.replace(b"\n", b"\r\n\r\n") * 2, [{"q": "1+1?", "a": 2}] * 2),
        ("a.jsonl", b'{"a": "\\ud83d\\ude00 \\\\ud800"}', [{"a": "\N{GRINNING FACE} \\ud800"}]),  # no lone surrogate
    ],
)
def test_what_is_read(tmp_path, name, data, rows):
    (tmp_path / name).write_bytes(data)
    assert load_rows(tmp_path / name) == rows


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", GOOD + '{"q": "é"}'.encode("latin-1"), r"a\.jsonl:2: not UTF-8 text \(byte 0xe9\).*LATIN1"),
        ("a.json", '[{"q": 1},\n{"q": "é"}]'.encode("latin-1"), r"a\.json:2: not UTF-8 text \(byte 0xe9\)"),
        ("a.csv", "q,a\né,1\n".encode("latin-1"), r"a\.csv:2: not UTF-8 text"),
        ("a.jsonl", GOOD.decode().encode("utf-16"), r"a\.jsonl:1: not UTF-8 text \(byte 0xf[ef]\).*UTF-16"),
        ("a.json", GOOD.decode().encode("utf-16"), r"a\.json:1: not UTF-8 text .*UTF-16"),
        ("a.jsonl", GOOD.decode().encode("utf-16-le"), r"a\.jsonl:1: not UTF-8 text \(byte 0x00\).*-f UTF-16LE "),
        ("a.json", b'["\xe9"]'.decode("latin-1").encode("utf-16-be"), r"a\.json:1: not UTF-8 text .*-f UTF-16BE "),
        ("a.csv", "é,a\n1,2\n".encode("utf-16-le"), r"a\.csv:1: not UTF-8 text \(byte 0xe9\).*-f UTF-16LE "),
        (
            "a.jsonl",
            gzip.compress(GOOD, mtime=0),
            r"a\.jsonl: it is not text but compressed by gzip: unpack it \(gzip: or name it \.gz\)",
        ),
        ("a.json", lzma.compress(GOOD), r"a\.json: it is not text but compressed by xz"),
        ("a.csv", bz2.compress(GOOD * 9), r"a\.csv: it is not text but compressed by bzip2"),
        ("a.jsonl", GOOD + b'{"q": \0\x1b}', r'a\.jsonl:2: not JSON .*: {"q": \\x00\\x1b}'),
        ("a.jsonl", GOOD + b"[" * 100_000, r"a\.jsonl:2: its brackets are nested more deeply"),
        ("a.jsonl", GOOD + b'{"q": ' * 100_000, r"a\.jsonl:2: its brackets"),
        ("a.json", b'[{"q": 1}, ' + b"[" * 100_000, r"a\.json, row 2: its brackets"),
        ("a.json", b'{"q": ' + b"[" * 100_000, r"a\.json:1: its brackets"),
        ("a.jsonl", GOOD + b'{"a": %s}' % (b"9" * 6000), r"a\.jsonl:2: an integer has more than 4300 digits"),
        ("a.json", b'[{"a": 1}, {"a": %s}]' % (b"9" * 6000), r"a\.json, row 2: an integer"),
        ("a.jsonl", GOOD + b'{"q": 1, "a": 2, "q": 3}', r"a\.jsonl:2: one object has the key 'q' twice"),
        ("a.jsonl", b'{"a": {"x": 1, "x": 1}}', r"a\.jsonl:1: one object has the key 'x' twice"),
        ("a.json", b'[{"q": 1}, {"q": 1, "q": 3}]', r"a\.json, row 2: one object has the key"),
        ("a.jsonl", GOOD + b'{"q": "\\ud83d!"}', r"a\.jsonl:2: its text has half of a character, \\ud83d"),
        ("a.json", b'[{"q": 1}, {"q": ["\\uDC00"]}]', r"a\.json, row 2: its text has half of a character"),
        ("a.jsonl", GOOD + b'{"q": 1} {"q": 2}', r"a\.jsonl:2: not JSON \(Extra data, column 10\)"),
        ("a.json", b'[{"q": 1} {"q": 2}]', r"a\.json:1: not JSON \(Expecting ',' delimiter, column 11\)"),
        ("a.json", b'[{"q": 1},\n]', r"a\.json:2: not JSON \(Expecting value, column 1\)"),
        ("a.json", b'[{"q": 1}]\n{"q": 2}', r"a\.json:2: not JSON \(Extra data"),
        ("a.json", b'[{"q": 1}, 2]', r"a\.json: a \.json data set is a list of objects"),
        (
            "a.json",
            b'{"data": [{"q": 1}], "version": 1}',
            r"a\.json: .* this one is an object that holds .* 'data': save",
        ),
        ("a.jsonl.gz", GOOD, r"a\.jsonl\.gz: it is not a gzip file, or a broken one"),
        ("a.jsonl.gz", gzip.compress(GOOD * 99, mtime=0)[:-9], r"a\.jsonl\.gz: it is not a gzip file, or a broken one"),
        ("a.json.gz", gzip.compress(b'[{"q": 1},\n]', mtime=0), r"a\.json\.gz:2: not JSON"),
        ("a.jsonl", POINTER, r"a\.jsonl is a pointer of Git LFS, not the file: run `git lfs pull`"),
        ("a.parquet", POINTER, r"a\.parquet is a pointer of Git LFS"),
        ("a.json", b"[]", "the data set is empty"),
        ("a.json", b" ", "the data set is empty"),
        ("a.csv", b"q,a\n1,2\n1,2,3\n", r"a\.csv:3: 3 cells under 2 columns \(q, a\)"),
        ("a.csv", b"q,a\n1\n", r"a\.csv:2: 1 cells under 2 columns"),
        ("a.csv", b"q,q\n1,2\n", r"a\.csv:1: two columns have one name: q, q"),
        ("a.csv", b'q,a\n1,"2', r"a\.csv:2: not CSV \(unexpected end of data\)"),
        ("a.csv", b"", "the data set is empty"),
    ],
)
def test_what_is_refused(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message) as told:
        load_rows(tmp_path / name)
    assert str(told.value).isprintable() and len(str(told.value)) < 400


def test_a_limit_reads_no_further(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(GOOD * 2 + b"not JSON")
    assert len(load_rows(tmp_path / "a.jsonl", limit=2)) == 2


def test_text_needs_no_datasets(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it would raise
    (tmp_path / "a.jsonl").write_bytes(GOOD)
    assert load_rows(tmp_path / "a.jsonl")
