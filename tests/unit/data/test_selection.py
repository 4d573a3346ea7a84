import pytest

from megatron_rft.data.selection import Choice, select
from megatron_rft.utils.errors import DataError

SHARDS = ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"]
SUBJECTS = ["algebra/train-0.parquet", "algebra/test-0.parquet", "geometry/train-0.parquet", "geometry/test-0.parquet"]


@pytest.mark.parametrize(
    ("names", "choice", "expected"),
    [
        (SHARDS[::-1], Choice("train"), SHARDS[:2]),
        (SHARDS, Choice("train", split="test"), SHARDS[2:]),
        (["train_sft.jsonl", "train_gen.jsonl"], Choice("train", split="train_sft"), ["train_sft.jsonl"]),
        (SUBJECTS, Choice("test"), [SUBJECTS[1], SUBJECTS[3]]),  # every subset
        (SUBJECTS, Choice("test", subset="geometry"), SUBJECTS[3:]),
        (["val.jsonl", "train.jsonl"], Choice("validation"), ["val.jsonl"]),
        (["train.jsonl", "latest.jsonl"], Choice("test"), ["latest.jsonl", "train.jsonl"]),  # "latest" is no "test"
        (["test.jsonl"], Choice("validation"), ["test.jsonl"]),  # the one part that there is
        (["a-00.parquet", "a-01.parquet"], Choice("train"), ["a-00.parquet", "a-01.parquet"]),
        (["v/test.jsonl", "v/test6.jsonl"], Choice("test", files="test6.jsonl"), ["v/test6.jsonl"]),
        (["x_l1.json", "x_l12.json"], Choice("test", subset="x_l1"), ["x_l1.json"]),
        (["a.json", "train/dataset_info.json", "state.json"], Choice("train"), ["a.json"]),
        (["a.csv", "b.csv"], Choice("train"), ["a.csv", "b.csv"]),
        (["a.csv", "a.jsonl", "a.json", "a.txt"], Choice("train"), ["a.jsonl"]),
        (["a.txt", "a.CSV"], Choice("train"), ["a.CSV"]),
        (["b.jsonl.gz", "a.jsonl"], Choice("train"), ["a.jsonl", "b.jsonl.gz"]),
        (["d/state.json", "d/data-0.arrow", "d/cache-1.arrow", "e/a.json"], Choice(), ["d/state.json"]),
        (["state.json", "a.json"], Choice(), ["a.json"]),  # no folder of save_to_disk
        (["a.jsonl", "dataset_info.json", ".cache/b.jsonl", "README.md", "stats.json"], Choice("train"), ["a.jsonl"]),
    ],
)
def test_names_say_which_files(names, choice, expected):
    assert select(names, choice, "folder") == expected


@pytest.mark.parametrize(
    ("names", "choice", "message"),
    [
        (SHARDS, Choice("validation"), "there is no validation among its splits, test, train: choose one"),
        (SHARDS, Choice("train", split="dev"), "no file of the split 'dev'; there are data/test-00000"),
        (SUBJECTS, Choice("test", subset="logic"), "no file of the subset 'logic'"),
        (
            [
                "ALL/test-0.parquet",
                "ALL/train-0.parquet",
                "ALL/train-1.parquet",
                "train/data-0.arrow",
                "test/data-0.arrow",
            ],
            Choice("train"),
            r"\.arrow and \.parquet files; .*files: \"ALL/train-\*\.parquet\"",  # not the test's
        ),
        (
            ["README.md"],
            Choice("train"),
            "no file of a data set; there is no .parquet, .arrow, .jsonl, .*txt or .* file at all",
        ),
    ],
)
def test_what_no_name_says_is_not_guessed(names, choice, message):
    with pytest.raises(DataError, match=f"folder: .*{message}"):
        select(names, choice, "folder")
