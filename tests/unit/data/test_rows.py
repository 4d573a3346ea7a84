import json

import pytest

from megatron_rft.data.rows import load_rows
from megatron_rft.utils.errors import DataError

ROWS = [{"question": "1+1?", "answer": "#### 2"}, {"question": "2+2?", "answer": "#### 4"}]


def test_the_three_file_kinds_give_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for suffix in ("jsonl", "json", "parquet"):
        assert load_rows(tmp_path / f"a.{suffix}") == ROWS
        assert load_rows(tmp_path / f"a.{suffix}", limit=1) == ROWS[:1]


def test_arrow_as_a_stream_and_as_a_file(tmp_path):
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    for name, writer in (("a.arrow", pyarrow.ipc.new_stream), ("b.arrow", pyarrow.ipc.new_file)):
        with writer(tmp_path / name, table.schema) as out:
            out.write_table(table, max_chunksize=1)
        assert load_rows(tmp_path / name) == ROWS


def test_a_folder_of_shards(tmp_path):
    for number, row in enumerate(ROWS):
        (tmp_path / f"train-{number}.json").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")  # lines
    (tmp_path / "test-0.json").write_text(json.dumps(ROWS[:1]))
    assert load_rows(tmp_path) == [ROWS[0], ROWS[0], ROWS[1], ROWS[1]]
    assert load_rows(tmp_path, "test") == load_rows(tmp_path, part="test") == ROWS[:1]
    assert load_rows(tmp_path, limit=3) == [ROWS[0], ROWS[0], ROWS[1]]


def test_arithmetic_by_name():
    assert len(load_rows("arithmetic", "test", limit=7)) == 7


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"q": 1}\n{"q": \n', r"a\.jsonl:2: not JSON \(Expecting value, column \d+\): {\"q\":"),
        ("a.jsonl", "[1, 2]\n", r"a\.jsonl:1: a row is an object .* not list: \[1, 2\]"),
        ("a.jsonl", "\n", "the data set is empty"),
        ("a.json", "[{]", r"a\.json:1: not JSON"),
        ("a.json", '{"q": 1}', "a list of objects"),
        ("a.json", '{"q": 1}\n[2]\n', r"a\.json:2: a row is an object"),
        ("a.parquet", "text", "not a parquet file"),
        ("a.arrow", "text", "not an Arrow file"),
        ("a.csv", "q,a", r"a data set is a \.parquet, \.jsonl, \.json, \.arrow file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_rows(tmp_path / name)


def test_missing_file():
    with pytest.raises(DataError, match="nowhere.jsonl: no such file"):
        load_rows("nowhere.jsonl")
