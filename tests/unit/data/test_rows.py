import datetime
import json
import shutil
import subprocess
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from megatron_rft.data.rows import load_rows
from megatron_rft.utils.errors import ConfigError, DataError
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


def test_rows_of_a_function(tmp_path):
    """It gets the split, or the source's key, and the limit. A slice cuts all of its rows."""
    assert len(load_rows("examples/quickstart/arithmetic.py:rows", "test", limit=7)) == 7
    file = tmp_path / "made.py"
    file.write_text(
        "def rows(split, limit):\n"
        "    return [{'question': split, 'number': n} for n in range(limit or 10)] * (split != 'none')\n"
        "def lists(split, limit):\n    return [[1]]\n"
        "def fails(split, limit):\n    return {}[split]\n"
        "def takes_one(split):\n    return []\n"
    )
    assert load_rows(f"{file}:rows", limit=3)[2] == {"question": "train", "number": 2}
    assert [row["number"] for row in load_rows(f"{file}:rows", "dev[80%:]")] == [8, 9]
    assert len(load_rows(f"{file}:rows", "dev[80%:]+test", limit=5)) == 5
    for name, split, message in (
        ("none", "dev", "made.py has no none"),
        ("rows", "none", "the data set is empty"),
        ("lists", "dev", r"TypeError: a row is a dict with named fields, not \[1\]"),
        ("fails", "dev", r"made.py:fails\(split, limit\): KeyError: 'dev' \(made.py, line 6\)"),
        ("takes_one", "dev", r"made.py:takes_one\(split, limit\): TypeError: takes_one\(\) takes 1 positional"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            load_rows(f"{file}:{name}", split)


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
    with pytest.raises(DataError, match=r"a\.parquet: is broken after row 2000 \("):
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
        ("a.xml", "text", r"a\.xml is not a \.parquet, .* or \(text\) \.gz file"),
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


def test_slices_of_a_split_are_those_of_datasets(tmp_path):
    rows = [{"n": n} for n in range(13)]
    (tmp_path / "train-0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:9]))
    (tmp_path / "train-1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[9:]))
    (tmp_path / "test.jsonl").write_text('{"n": 99}\n')
    whole = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    whole.save_to_disk(tmp_path / "saved")
    whole["train"].to_parquet(tmp_path / "p" / "train.parquet")
    cache = str(tmp_path / "cache")
    for split in ("train[:80%]", "train[80%:]", "train[2:5]", "train[-3:]", "train[:-10%]", "train[:99]+train[1:2]"):
        expected = datasets.load_dataset(str(tmp_path / "p"), split=split, cache_dir=cache).to_list()
        for place in ("saved", "p"):
            assert load_rows(tmp_path / place, split) == expected
        assert load_rows(tmp_path, split, files="train-*.jsonl") == expected
    for name in ("saved", "p", "cache"):
        shutil.rmtree(tmp_path / name)
    mixed = load_rows(tmp_path, "train[-5:]+test")
    assert mixed == [*rows[-5:], {"n": 99}]
    assert [mixed.place(index).rpartition("/")[2] for index in (0, 1, 5)] == [
        "train-0.jsonl:9",
        "train-1.jsonl:1",
        "test.jsonl:1",
    ]
    assert load_rows(tmp_path / "test.jsonl", "train[:50%]+train[50%:]") == [{"n": 99}]
    with pytest.raises(DataError, match=r"the data set is empty \(test\[:0%\]\)"):
        load_rows(tmp_path, "test[:0%]")
    with pytest.raises(DataError, match=r"train\[:500%\]: Percent slice boundaries"):
        load_rows(tmp_path, "train[:500%]")


def test_a_folder_with_a_card(tmp_path):
    (tmp_path / "README.md").write_text('---\nconfigs: [{config_name: default, data_files: "b.*"}]\n---\n')
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"n": name}) + "\n")
    assert load_rows(tmp_path) == [{"n": "b"}] and load_rows(tmp_path, files="a.jsonl") == [{"n": "a"}]
    (tmp_path / "README.md").write_text('---\nconfigs: [{config_name: default, data_files: "c.*"}]\n---\n')
    with pytest.raises(DataError, match="the configurations of its README.md cannot be used .*option files"):
        load_rows(tmp_path)
    (tmp_path / "README.md").write_text("Rows.\n")
    assert load_rows(tmp_path) == [{"n": "a"}, {"n": "b"}]
