import json

from megatron_rft.utils.checkpoint_files import DIGESTS, complete, damage, join_digests


def checkpoint(run):
    folder = run / "checkpoints" / "step_000002"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text("{}")
    (folder / "__0_0.distcp").write_bytes(b"weights")
    return folder


def test_a_checkpoint_of_an_older_version_has_no_digests(tmp_path):
    assert damage(checkpoint(tmp_path)) == ""


def test_each_kind_of_damage_is_named(tmp_path):
    folder = checkpoint(tmp_path)
    join_digests(folder)
    assert damage(folder) == "" and set(json.loads((folder / DIGESTS).read_text())) == {"run.json", "__0_0.distcp"}
    shard = folder / "__0_0.distcp"
    shard.write_bytes(b"weighty")
    assert damage(folder) == "__0_0.distcp has other content than was written"
    assert [damage(folder, share, 2) == "" for share in (0, 1)] == [False, True]
    shard.write_bytes(b"weight")
    assert damage(folder) == "__0_0.distcp has 6 bytes instead of 7"
    shard.unlink()
    assert damage(folder) == "__0_0.distcp is missing"
    (folder / DIGESTS).write_text("{")
    assert damage(folder) == "digests.json cannot be read"


def test_a_users_copy_is_none_of_the_runs_checkpoints_and_steps_are_numbers(tmp_path):
    """A copy would be resumed from, count towards checkpoint.keep, and be removed."""
    for name in ("step_1000000", "step_999999", "step_999999_kept", "step_999999.damaged", "step_1.x.partial", "step_"):
        (tmp_path / name).mkdir()
    assert [path.name for path in complete(tmp_path)] == ["step_999999", "step_1000000"]


def test_a_checkpoint_without_run_json_is_damaged(tmp_path):
    """As an interrupted copy of a run leaves one, with its digests or before them."""
    folder = checkpoint(tmp_path)
    join_digests(folder)
    (folder / "run.json").unlink()
    assert damage(folder) == "run.json is missing"
    (folder / DIGESTS).unlink()
    assert damage(folder) == "run.json is missing" and complete(folder.parent) == [folder]
