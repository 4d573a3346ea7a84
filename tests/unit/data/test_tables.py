"""Files and folders that `datasets` wrote, against the rows that it reads from them."""

import io

import datasets
import pytest
from PIL import Image

from megatron_rft.data.rows import load_rows
from megatron_rft.utils.errors import DataError

ROWS = [
    {"question": f"{n}+{n}?", "answer": str(2 * n), "meta": {"level": n, "tags": [str(n), None]}} for n in range(20)
]


def reread(folder, change=lambda rows: rows):
    """The data set of a saved folder, after a change that leaves its cache files in the folder."""
    return change(datasets.load_from_disk(folder))


def doubled(row):
    return {"answer": row["answer"] * 2}


CHANGES = {
    "nothing": lambda rows: rows,
    "map": lambda rows: rows.map(doubled),
    "filter": lambda rows: rows.filter(lambda row: len(row["answer"]) == 2),
    "shuffle": lambda rows: rows.shuffle(seed=1),
    "select": lambda rows: rows.select([3, 1, 7]),
    "concatenate": lambda rows: datasets.concatenate_datasets([rows, rows.map(doubled)]),
    "several": lambda rows: rows.map(doubled).shuffle(seed=2).filter(lambda row: row["answer"] > "2").select(range(5)),
    "formatted": lambda rows: rows.with_format("numpy", columns=["answer"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_folder_is_read_as_datasets_reads_it(tmp_path, name):
    """Caches stay in a folder: the data set in it was changed in memory, which leaves the folder's rows as they are."""
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "first", num_shards=3)
    changed = reread(tmp_path / "first", CHANGES[name])
    changed.save_to_disk(tmp_path / "second", num_shards=2)
    reread(tmp_path / "second", lambda rows: rows.map(doubled).shuffle(seed=3))
    assert load_rows(tmp_path / "first") == ROWS
    expected = changed.with_format(None).to_list()
    assert load_rows(tmp_path / "second") == expected and len(expected) >= 3
    assert load_rows(tmp_path / "second", limit=2) == expected[:2]
    if name in ("map", "filter", "shuffle", "several"):
        assert list((tmp_path / "first").glob("cache-*.arrow")) and list((tmp_path / "second").glob("cache-*.arrow"))


def test_splits_of_a_folder(tmp_path):
    rows = datasets.Dataset.from_list(ROWS)
    parts = datasets.DatasetDict({"train": rows.shuffle(seed=1), "test": rows.select(range(2))})
    parts.save_to_disk(tmp_path)
    datasets.load_from_disk(tmp_path)["test"].map(doubled)
    assert load_rows(tmp_path) == parts["train"].to_list() and load_rows(tmp_path, "test") == ROWS[:2]
    assert load_rows(tmp_path / "test") == ROWS[:2]


def test_a_folder_without_rows(tmp_path):
    datasets.Dataset.from_list(ROWS).filter(lambda row: False).save_to_disk(tmp_path)
    with pytest.raises(DataError, match="the data set is empty"):
        load_rows(tmp_path)


def test_a_folder_that_lost_a_file_is_refused(tmp_path):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "a", num_shards=2)
    (tmp_path / "a" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(
        DataError, match=r"a: cannot be read as a folder of save_to_disk \(.*data-00001-of-00002\.arrow"
    ):
        load_rows(tmp_path / "a")


def picture(color) -> bytes:
    with io.BytesIO() as file:
        Image.new("RGB", (2, 3), color).save(file, "PNG")
        return file.getvalue()


def test_images_stay_as_they_are_stored(tmp_path):
    stored = [{"bytes": picture((n, 0, 0)), "path": None} for n in range(4)]
    (tmp_path / "a.png").write_bytes(picture("red"))
    stored.append({"bytes": None, "path": str(tmp_path / "a.png")})  # save_to_disk reads it
    rows = [{"image": one, "pages": [one, stored[0]], "parts": [{"kind": "image", "image": one}]} for one in stored]
    features = {"image": datasets.Image(), "pages": datasets.List(datasets.Image())}
    features["parts"] = datasets.List({"kind": datasets.Value("string"), "image": datasets.Image()})
    written = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    written.select([4, 0, 1]).save_to_disk(tmp_path / "saved")
    one, two, three = load_rows(tmp_path / "saved")
    assert [two, three] == rows[:2] and one["image"] == {"bytes": picture("red"), "path": "a.png"}
    written.select(range(4)).to_parquet(tmp_path / "a.parquet")
    assert load_rows(tmp_path / "a.parquet") == rows[:4]
    assert datasets.load_from_disk(tmp_path / "saved")[0]["image"].size == (2, 3)


def test_objects_have_the_keys_that_they_were_written_with(tmp_path):
    calls = [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {"zone": "UTC"}}]
    rows = [
        {"messages": [{"role": "user", "content": "1+1?"}], "none": None, "tools": {"add": {"a": 1}}},
        {
            "messages": [{"role": "assistant", "calls": calls, "scores": [1.5, None]}],
            "none": None,
            "tools": {"now": {"b": [{"c": 1}, {"d": 2}]}},
        },
    ]
    written = datasets.Dataset.from_list(rows)
    assert written[0]["messages"][0].keys() == {"role", "content", "calls", "scores"}  # filled
    written.to_parquet(tmp_path / "a.parquet")
    written.save_to_disk(tmp_path / "saved")
    assert load_rows(tmp_path / "a.parquet") == load_rows(tmp_path / "saved") == rows


def test_json_text_of_a_column_becomes_its_value(tmp_path):
    features = datasets.Features({"any": datasets.Json(), "label": datasets.ClassLabel(names=["no", "yes"])})
    rows = [{"any": {"a": [1, None]}, "label": 1}, {"any": "text", "label": 0}, {"any": {"b": None}, "label": 0}]
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "a.parquet")
    assert load_rows(tmp_path / "a.parquet") == datasets.Dataset.from_list(rows, features=features).to_list()
