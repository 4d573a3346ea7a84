"""A router's biases that training moves come through checkpoint and resume into engine, export and `convert`."""

import torch
from safetensors.torch import load_file
from transformers import Glm4MoeConfig

from megatron_rft.commands.main import main
from tests.integration.tiny import metrics, train, write_recipe
from tests.shapes import sizes

RATE, BIAS = 0.0625, "e_score_correction_bias"  # a power of two: multiples are exact
EXPERTS = dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, n_group=1)
EXPERTS |= dict(topk_group=1, moe_intermediate_size=16, head_dim=8, initializer_range=0.2)
SPECIAL = dict(vocab_size=8, pad_token_id=0, eos_token_id=1, bos_token_id=None)


def test_moved_biases(tmp_path):
    """Two optimizer steps in each of four steps. The engine computes each response with the biases of its step: it
    chooses its own experts, so others would show in mismatch/kl: 6.6e-3 where it had those of the step before."""
    recipe = write_recipe(
        tmp_path,
        run={"steps": 4},
        algorithm={"kl_coefficient": 0.0},
        megatron={"moe_router_bias_update_rate": RATE},
        rollout={"placement": "process", "replay_routes": "off"},
    )
    Glm4MoeConfig(**sizes(3, 32, 4, 2, 48), **EXPERTS, **SPECIAL).save_pretrained(tmp_path / "model")
    status, output = train(recipe)
    assert status == 0, output[-3000:]
    out = tmp_path / "resumed"
    for steps in (2, 4):
        status, output = train(recipe, f"run.output_dir={out}", f"run.steps={steps}")
        assert status == 0, output[-3000:]
    assert "resumed after step 2" in output
    for run in (tmp_path / "run", out):
        assert max(line["mismatch/kl"] for line in metrics(run)[1:]) < 1e-6
        assert all(line["policy/computed_share"] == 1 for line in metrics(run)[1:]), "responses are left out"

    assert main(["convert", str(out), str(tmp_path / "converted")]) == 0
    folders = [tmp_path / "run/export", out / "export", tmp_path / "converted"]
    whole, *others = (load_file(folder / "model.safetensors") for folder in folders)
    for other in others:
        assert whole.keys() == other.keys() and all(torch.equal(whole[name], other[name]) for name in whole)
    moved = torch.stack([tensor for name, tensor in whole.items() if name.endswith(BIAS)]) / RATE  # [layers, experts]
    assert moved.shape == (2, 4) and torch.equal(moved, moved.round())
    assert 4 <= moved.abs().max() <= 8, moved
