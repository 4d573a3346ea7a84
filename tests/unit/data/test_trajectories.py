"""The trajectory store: the same files whatever the order of work, and damaged stores are refused."""

import json

import pytest

from megatron_rft.data import trajectories as store
from megatron_rft.data.trajectories import Trajectory
from megatron_rft.utils.errors import DataError

REWARDS = {0: (1, -1), 1: (1, 1), 2: (-1, -1), 3: (-1, 1), 4: (None, None), 5: (1, None), 6: (1, -1), 7: (-1, 1)}
SHARDS = ((0, 1, 2), (3, 4, 5), (6, 7))


def answers(problem, rewards=None):
    rewards = rewards or REWARDS[problem]
    return [
        Trajectory(
            problem=problem,
            sample=sample,
            prompt=f"problem {problem}",
            answer=str(problem),
            prompt_ids=(1, problem),
            response_ids=tuple(range(3, 4 + problem + sample)),
            text="...",
            reward=reward,
            error="grader died" if reward is None else None,
            logprobs=(-0.5,) * (1 + problem + sample),
            finish_reason="stop",
            fields=json.dumps({"tests": {"kind": "call"}, "level": problem}) if sample == 0 else None,
        )
        for sample, reward in enumerate(rewards)
    ]


def write(folder, order=(0, 1, 2), held_out=0.25, **changed):
    for number in order:
        found = [each for problem in SHARDS[number] for each in reversed(answers(problem, changed.get(f"p{problem}")))]
        store.write_shard(folder, number, found)
    return store.finish(folder, 3, held_out, 7, {"model": "m"})


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_kept_and_what_is_held_out(tmp_path):
    index = write(tmp_path)
    assert sorted(index["train"] + index["held_out"]) == [0, 3, 6, 7] and len(index["held_out"]) == 1
    summary = index["summary"]
    assert {name: summary[name] for name in ("all_right", "all_wrong", "not_graded", "kept", "held_out")} == {
        "all_right": 2,
        "all_wrong": 1,
        "not_graded": 1,
        "kept": 4,
        "held_out": 1,
    }
    assert summary["responses"] == 16 and summary["ungraded"] == 3 and summary["share_right"] == 7 / 13
    assert (
        summary["mean_tokens"]
        <= summary["most_tokens"]
        == max(len(each.response_ids) for problem in REWARDS for each in answers(problem))
    )
    assert "4 problems kept, 1 of them held out; dropped: 2 all right, 1 all wrong, 1 not graded" in store.describe(
        summary
    )


def test_reads_what_was_written(tmp_path):
    index = write(tmp_path)
    found = store.read(tmp_path)
    expected = [each for problem in index["train"] for each in answers(problem)]
    assert found.train.prompt_ids.tolist() == [id for each in expected for id in each.prompt_ids]
    assert found.train.response_ids.tolist() == [id for each in expected for id in each.response_ids]
    assert found.train.response_lens.tolist() == [len(each.response_ids) for each in expected]
    assert found.train.groups.tolist() == [each.problem for each in expected]
    assert found.train.sequences["rewards"].tolist() == [each.reward for each in expected]
    (apart,) = found.held_out
    assert (apart.index, apart.text, apart.token_ids) == (
        *index["held_out"],
        f"problem {apart.index}",
        (1, apart.index),
    )
    assert apart.fields == {"tests": {"kind": "call"}, "level": apart.index}, "what its verifier needs"


def test_other_libraries_read_the_shards(tmp_path):
    datasets = pytest.importorskip("datasets")
    write(tmp_path / "store")
    pattern = str(tmp_path / "store/shards/*.parquet")
    rows = datasets.load_dataset("parquet", data_files=pattern, split="train", cache_dir=str(tmp_path / "hub"))
    expected = [each for problem in REWARDS for each in answers(problem)]
    assert [(row["problem"], row["sample"], row["reward"]) for row in rows] == [
        (each.problem, each.sample, each.reward) for each in expected
    ]
    assert [tuple(row["response_ids"]) for row in rows] == [each.response_ids for each in expected]


def test_the_store_does_not_depend_on_the_order_of_work(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b", order=(2, 0, 1))
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_store_of_half_its_shards_is_none(tmp_path):
    assert write(tmp_path, order=(0, 2)) is None and store.missing(tmp_path, 3) == [1]
    with pytest.raises(DataError, match="index.json is missing or torn"):
        store.read(tmp_path)


def test_missing_and_torn_shards(tmp_path):
    write(tmp_path)
    path = store.shard_path(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"000001.parquet: torn or changed"):
        store.read(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match=r"the shard 000001.parquet is missing"):
        store.read(tmp_path)
    (tmp_path / "index.json").write_text('{"facts": {')
    with pytest.raises(DataError, match="torn"):
        store.read(tmp_path)


def test_a_torn_shard_is_seen_before_an_index_is_made_of_it(tmp_path):
    write(tmp_path, order=(0, 1, 2))
    path = store.shard_path(tmp_path, 2)
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="no parquet file of trajectories"):
        store.finish(tmp_path, 3, 0.25, 7, {})


@pytest.mark.parametrize("held_out", [0.0, 0.25, 0.5])
def test_the_share_held_out(tmp_path, held_out):
    index = write(tmp_path, held_out=held_out)
    assert len(index["held_out"]) == 4 * held_out and not set(index["held_out"]) & set(index["train"])
    assert store.hold_out([0, 3, 6, 7], held_out, 7) == index["held_out"]
    assert [len(store.hold_out(list(range(n)), 0.99, 7)) for n in (0, 1, 2, 30)] == [0, 0, 1, 29]  # never all
    assert store.hold_out(list(range(100)), 0.05, 7) != store.hold_out(list(range(100)), 0.05, 8)


def test_rewards_other_than_right_or_wrong(tmp_path):
    write(tmp_path, p0=(1, -1, 0))
    with pytest.raises(DataError, match=r"problem 0, response 2 has the reward 0"):
        store.read(tmp_path)


def test_an_empty_response(tmp_path):
    write(tmp_path)
    empty = [Trajectory(**{**each.__dict__, "response_ids": (), "logprobs": ()}) for each in answers(6)]
    store.write_shard(tmp_path, 2, empty + answers(7))
    store.finish(tmp_path, 3, 0.25, 7, {})
    with pytest.raises(DataError, match=r"problem 6, response 0 is empty"):
        store.read(tmp_path)


def test_nothing_to_learn_from(tmp_path):
    write(tmp_path, **{f"p{problem}": (1, 1) for problem in REWARDS})
    with pytest.raises(DataError, match="nothing to learn from"):
        store.read(tmp_path)
    assert json.loads((tmp_path / "index.json").read_text())["summary"]["all_right"] == 8
