"""Compares published steps of RL with the plan's arithmetic, for the recipes in examples/peers.

python -m tools.fit_table

Prints the rows of docs/planning.md: the memory of the largest phase, generation with a tail of long responses, the
rest of the step with no message hidden, their sum, the published seconds, and how far the sum and 1.5 times it are
from them.
"""

import json
import tempfile
from pathlib import Path
from typing import NamedTuple

from megatron_rft.config import load
from megatron_rft.plan import memory, model_shape
from megatron_rft.plan.devices import device
from megatron_rft.plan.layout import check_layout
from megatron_rft.plan.search import Search
from tests.shapes import json_of
from tests.unit.plan.test_shipped_recipes import MODELS

PEERS = Path(__file__).parents[1] / "examples/peers"
MIXTURE = dict(model_type="qwen3_moe", num_experts=128, moe_intermediate_size=768, num_experts_per_tok=8)
A3B = MODELS["Qwen/Qwen3-32B"] | json_of(48, 2048, 32, 4, 6144, 151_936, 128, norm_topk_prob=True, **MIXTURE)
A3B |= {"architectures": ["Qwen3MoeForCausalLM"], "max_position_embeddings": 40_960, "decoder_sparse_step": 1}
LLAMA = MODELS["meta-llama/Llama-3.2-3B-Instruct"] | {"tie_word_embeddings": False}
CONFIGS = MODELS | {
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA | json_of(32, 4096, 32, 8, 14_336, 128_256, 128),
    "Qwen/Qwen3-30B-A3B": A3B | {"mlp_only_layers": []},
    "Qwen/Qwen3-30B-A3B-Base": A3B | {"mlp_only_layers": []},
}


class Published(NamedTuple):
    """`fraction`: mean length as a share of the longest."""

    gpus: int
    device: str
    fraction: float
    seconds: float


STEPS = {
    "nemo_rl_llama3.1_8b": Published(16, "h100", 1060 / 4096, 97.7),
    "nemo_rl_qwen3_32b": Published(32, "h100", 3206 / 4096, 393),
    "nemo_rl_qwen3_30b_a3b": Published(32, "h100", 3203 / 4096, 192),
    "verl_qwen3_30b_a3b": Published(128, "h20", 0.5, 497.9),
}


def predicted(name: str, folder: Path) -> tuple[float, float, float]:
    """Return the planned GiB of the largest phase, and seconds of generation and of the rest of a step."""
    published, recipe = STEPS[name], load(PEERS / f"{name}.yaml")
    (folder / "config.json").write_text(json.dumps(CONFIGS[recipe.model.path]))
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder)})})
    layout = check_layout(recipe.megatron, published.gpus, model_shape.read_shape(folder))
    gib = device(published.device).usable / memory.GIB
    search = Search(recipe, layout, gib, published.device, published.fraction)
    own = search._candidate(layout)
    return own.memory / memory.GIB, search.engines()[recipe.vllm.tensor_parallel_size], own.seconds.most


def rows() -> list[str]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (gpus, _, _, theirs) in STEPS.items():
            gib, generation, rest = predicted(name, Path(folder))
            total = generation + rest
            errors = " | ".join(f"{factor * total / theirs - 1:+.0%}" for factor in (1, 1.5))
            figures = f"{gib:.1f} | {generation:.0f} | {rest:.0f} | {total:.0f} | {theirs:g} | {errors}"
            found.append(f"| {name} | {gpus} | {figures} |")
    return found


if __name__ == "__main__":
    print("\n".join(rows()))
