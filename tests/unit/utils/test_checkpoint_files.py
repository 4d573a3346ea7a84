import json

from megatron_rft.utils.checkpoint_files import DIGESTS, damage, join_digests


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
