import datetime
import json
import subprocess
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from megatron_rft.data.rows import load_rows
from megatron_rft.utils.errors import DataError
from tests.integration.tiny import write_recipe

ROWS = [{"question": "1+1?", "answer": "#### 2"}, {"question": "2+2?", "answer": "#### 4"}]


def test_the_three_file_kinds_give_the_same_rows(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for suffix in ("jsonl", "json", "parquet"):
        assert load_rows(tmp_path / f"a.{suffix}") == ROWS
        assert load_rows(tmp_path / f"a.{suffix}", limit=1) == ROWS[:1]


def test_columns_of_one_name_are_refused_and_nanoseconds_are_read(tmp_path):
    twice = pyarrow.table([[1], [2]], names=["a", "a"])
    pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", twice.schema) as out:
        out.write_table(twice)
    for name in ("a.parquet", "a.arrow"):
        with pytest.raises(DataError, match=rf"{name}: cannot be read as .*(\(a\)|\"a\" exists 2 times)"):
            load_rows(tmp_path / name)
    times = {kind: pyarrow.array([1_500], kind("ns")) for kind in (pyarrow.timestamp, pyarrow.duration)}
    table = pyarrow.table(list(times.values()), names=["at", "for"])
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    (row,) = load_rows(tmp_path / "b.parquet")
    assert row["at"].microsecond == 1 and row["for"].microseconds == 1
    assert isinstance(row["at"], datetime.datetime) and isinstance(row["for"], datetime.timedelta)


def test_arrow_as_a_stream_and_as_a_file(tmp_path):
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


def test_parquet_rows_keep_their_types_and_no_copy_is_written(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    date = datetime.datetime(2024, 1, 2)
    rows = [{"n": i, "none": None, "s": "2024-01-02", "d": date, "o": {"x": [i, None]}} for i in range(2500)]
    folder = tmp_path / ".hidden" / "__a [1]*"
    folder.mkdir(parents=True)
    for name in ("train[0].parquet", "train[1].parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name, row_group_size=700)
    assert load_rows(folder) == rows * 2 and load_rows(folder / "train[1].parquet", limit=1001) == rows[:1001]
    assert not cache.exists()


def test_a_truncated_table_is_named(tmp_path):
    table = pyarrow.Table.from_pylist([{"q": f"{i}", "a": i} for i in range(5000)])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1000)
    whole = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as a parquet file \(.*footer"):
        load_rows(tmp_path / "a.parquet")
    middle = len(whole) // 2
    (tmp_path / "a.parquet").write_bytes(whole[:middle] + bytes(middle // 2) + whole[middle + middle // 2 :])
    with pytest.raises(DataError, match=r"a\.parquet: is broken after row [1-4]000 \("):
        load_rows(tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table, max_chunksize=1000)
    whole = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"a\.arrow: is broken after row 2000 \("):
        load_rows(tmp_path / "a.arrow")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", '{"q": 1}\n{"q": \n', r"a\.jsonl:2: not JSON \(Expecting value, column \d+\): {\"q\":"),
        ("a.jsonl", "[1, 2]\n", r"a\.jsonl:1: a row is an object .* not list: \[1, 2\]"),
        ("a.jsonl", "\n", "the data set is empty"),
        ("a.json", "[{]", r"a\.json:1: not JSON"),
        ("a.json", '{"q": 1}', "a list of objects"),
        ("a.json", '{"q": 1}\n[2]\n', r"a\.json:2: a row is an object"),
        ("a.parquet", "text", "cannot be read as a parquet file"),
        ("a.arrow", "text", "cannot be read as an Arrow file"),
    ],
)
def test_bad_files_are_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_rows(tmp_path / name)


def test_a_plan_imports_neither_datasets_nor_pyarrow(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    recipe = write_recipe(tmp_path, data={"train": str(tmp_path / "a.parquet")})
    code = "import sys; from megatron_rft.commands.main import main; assert main(sys.argv[1:]) == 0; "
    code += "print({'datasets', 'pyarrow', 'pandas', 'huggingface_hub', 'torch'} & set(sys.modules))"
    told = subprocess.check_output([sys.executable, "-c", code, "plan", str(recipe)], text=True)
    assert told.splitlines()[-1] == "set()"
