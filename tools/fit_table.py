"""Compares published steps with the plan's arithmetic, for the recipes in examples/peers.

python -m tools.fit_table

Prints the rows of docs/planning.md: the memory of the largest phase, generation with a tail of long responses, the
rest of the step with no message hidden, their sum, the published seconds, the error, and what a row is for: the share
of its roofline that generation reaches (REACHED in tools/tail.py) is fitted to half of the steps of RL, and the
others test it. After the table it prints that fit.
"""

import json
import math
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
from tools import tail
from tools.tail import REACHED

PEERS = Path(__file__).parents[1] / "examples/peers"
MIXTURE = dict(model_type="qwen3_moe", num_experts=128, moe_intermediate_size=768, num_experts_per_tok=8)
A3B = MODELS["Qwen/Qwen3-32B"] | json_of(48, 2048, 32, 4, 6144, 151_936, 128, norm_topk_prob=True, **MIXTURE)
A3B |= {"architectures": ["Qwen3MoeForCausalLM"], "max_position_embeddings": 40_960, "decoder_sparse_step": 1}
A22B = A3B | json_of(94, 4096, 64, 4, 12_288, 151_936, 128, **MIXTURE | {"moe_intermediate_size": 1536})
LLAMA = MODELS["meta-llama/Llama-3.2-3B-Instruct"] | {"tie_word_embeddings": False}
CONFIGS = MODELS | {
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA | json_of(32, 4096, 32, 8, 14_336, 128_256, 128),
    "meta-llama/Llama-3.1-70B": LLAMA | json_of(80, 8192, 64, 8, 28_672, 128_256, 128),
    "Qwen/Qwen3-235B-A22B": A22B | {"mlp_only_layers": []},
    "Qwen/Qwen3-30B-A3B": A3B | {"mlp_only_layers": []},
    "Qwen/Qwen3-30B-A3B-Base": A3B | {"mlp_only_layers": []},
}


class Published(NamedTuple):
    """`fraction`: mean length as a share of the longest."""

    gpus: int
    device: str
    fraction: float
    seconds: float
    row: str = "test"


STEPS = {
    "nemo_rl_llama3.1_8b": Published(16, "h100", 1060 / 4096, 97.7, "fit"),
    "nemo_rl_qwen3_32b": Published(32, "h100", 3206 / 4096, 393),
    "nemo_rl_qwen3_30b_a3b": Published(32, "h100", 3203 / 4096, 192, "fit"),
    "nemo_rl_qwen3_235b": Published(128, "h100", 5698 / 8192, 395),
    "nemo_rl_qwen3_235b_256_gpus": Published(256, "h100", 5713 / 8192, 312, "fit"),
    "verl_qwen3_30b_a3b": Published(128, "h20", 0.5, 497.9),
    "bridge_llama3_70b": Published(64, "h100", 1, 19.7, ""),
    "bridge_llama3_70b_sft": Published(32, "h100", 1, 2.5, ""),
    "bridge_qwen3_30b_a3b": Published(16, "h100", 1, 28.9, ""),
    "bridge_qwen3_235b_a22b": Published(256, "h100", 1, 76.6, ""),
}


class Predicted(NamedTuple):
    """GiB of the largest phase, and seconds of generation and of the rest of a step."""

    gib: float
    generation: float
    rest: float


def predicted(name: str, folder: Path) -> Predicted:
    published, recipe = STEPS[name], load(PEERS / f"{name}.yaml")
    (folder / "config.json").write_text(json.dumps(CONFIGS[recipe.model.path]))
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(folder)})})
    layout = check_layout(recipe.megatron, published.gpus, model_shape.read_shape(folder))
    gib = device(published.device).usable / memory.GIB
    search = Search(recipe, layout, gib, published.device, published.fraction)
    own = search._candidate(layout)
    generation = tail.generation(search, recipe.vllm.tensor_parallel_size) if recipe.trainer == "rl" else 0
    return Predicted(own.memory / memory.GIB, generation, own.seconds.most)


def all_predicted() -> dict[str, Predicted]:
    with tempfile.TemporaryDirectory() as folder:
        return {name: predicted(name, Path(folder)) for name in STEPS}


def fitted(steps: dict[str, Predicted]) -> float:
    """Return the share, in hundredths, with the least sum of squared logarithms of the errors of the rows to fit."""

    def error(share: float) -> float:
        totals = {name: each.generation * REACHED / share + each.rest for name, each in steps.items()}
        return sum(math.log(totals[name] / STEPS[name].seconds) ** 2 for name in STEPS if STEPS[name].row == "fit")

    return min((hundredths / 100 for hundredths in range(10, 101)), key=error)


def rows(steps: dict[str, Predicted]) -> list[str]:
    found = []
    for name, (gib, generation, rest) in steps.items():
        gpus, _, _, theirs, row = STEPS[name]
        total = generation + rest
        apart = f"{generation:.0f} | {rest:.0f} | {total:.0f}" if generation else f"- | {rest:.1f} | {total:.1f}"
        found.append(f"| {name} | {gpus} | {gib:.1f} | {apart} | {theirs:g} | {total / theirs - 1:+.0%} | {row} |")
    return found


if __name__ == "__main__":
    steps = all_predicted()
    print("\n".join(rows(steps)))
    print(f"fitted share of generation's roofline: {fitted(steps):.2f}; REACHED is {REACHED}")
