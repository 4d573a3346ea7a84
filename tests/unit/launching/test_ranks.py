"""What the launcher gives its ranks."""

import os

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
