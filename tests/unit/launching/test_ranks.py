"""What the launcher gives its ranks."""

import os
import sys

from megatron_rft.launching import ranks


def test_compilers_cache_on_the_node_unless_the_user_says_where(monkeypatch, tmp_path):
    monkeypatch.setattr(ranks.tempfile, "tempdir", "/local")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("VLLM_CACHE_ROOT", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/scratch/triton")
    found = ranks._environment(2, ranks.Node(), 29500, tmp_path)
    assert found["TORCHINDUCTOR_CACHE_DIR"] == f"/local/megatron_rft_{os.getuid()}/inductor"
    assert found["VLLM_CACHE_ROOT"] == f"/local/megatron_rft_{os.getuid()}/vllm"
    assert found["TRITON_CACHE_DIR"] == "/scratch/triton"


def test_what_an_earlier_start_left_of_its_own_ranks_is_removed(tmp_path):
    """Ranks of a node that starts sooner may write to theirs already."""
    names = {"rank_0.json", "rank_1.json", "stacks/rank_0.stack", "stacks/rank_0_engine_7.stack", "stacks/rank_1.stack"}
    (tmp_path / "launch/stacks").mkdir(parents=True)
    for name in names:
        (tmp_path / "launch" / name).touch()
    assert ranks.launch([sys.executable, "-c", ""], 1, str(tmp_path)) == 0
    assert {name for name in names if (tmp_path / "launch" / name).exists()} == {"rank_1.json", "stacks/rank_1.stack"}
