"""What `plan`, `rehearse` and the floors predict for the checks of gpu_kit.py: tools/gpu_predicted.json. No torch.

    python tools/gpu_predictions.py     computes the table again, rehearsals included: some minutes; its CPU part stays

The model of the slice has Qwen3-8B's widths and vocabulary, and as many layers as `plan` finds room for.
"""

import functools
import json
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_rft.commands.rehearse import Rehearsal, Worker
from megatron_rft.config import Recipe, load
from megatron_rft.plan.devices import DEVICES, GIB, Device, Efficiency
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import MemoryPlan
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.seconds import Machine
from megatron_rft.plan.shared_prompts import SharedGroup

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tools" / "gpu_predicted.json"
RECIPE = ROOT / "examples" / "quickstart" / "pipo.yaml"
QWEN3_8B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16}
SLACK = 6 * GIB  # left free beside what `plan` counts: gaps of the allocator, and what libraries take
GROUP, MICRO_BATCH = 8, 9216
ONE_RANK = Layout(1, 1, 1, 1, 1, 1)
LOGPROBS = 4096, 151936, 4096  # tokens, vocabulary, hidden size


@dataclass(frozen=True)
class Case:
    """`groups` of 8 responses to a prompt, in tokens."""

    prompt: int
    response: int
    groups: int
    shared: bool
    recompute: bool = False
    precision: str = "bf16"

    @property
    def name(self) -> str:
        recompute = ", recompute" if self.recompute else ""
        return f"{GROUP} x {self.prompt:,} + {self.response}, prompts {'shared' if self.shared else 'apart'}{recompute}"

    @property
    def tokens(self) -> int:
        """Tokens of all sequences, as if none shared its prompt."""
        return self.groups * GROUP * (self.prompt + self.response)

    def options(self, folder: str) -> list[str]:
        """Options of the recipe whose update is this case."""
        whole = "megatron={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"
        return [
            f"model={{path: {folder}, precision: {self.precision}}}",
            f"data={{max_prompt_tokens: {self.prompt}, validation: null, test: null}}",
            f"rollout={{engine: hf, max_response_tokens: {self.response}, group_size: {GROUP}, "
            f"prompts_per_step: {self.groups}}}",
            f"batching={{micro_batch_tokens: {MICRO_BATCH}, share_prompts: {'auto' if self.shared else 'off'}}}",
            "pipo=null",
            "evaluation.every=null",
            *([whole] if self.recompute else []),
        ]

    @functools.cached_property
    def recipe(self) -> Recipe:
        return load(RECIPE, self.options("model"))


SIZES = ((1024, 128, 4), (4096, 512, 1))
CASES = [Case(*size, shared, again) for size in SIZES for shared in (False, True) for again in (False, True)]


def shape(layers: int, **changes) -> ModelShape:
    return ModelShape(QWEN3_8B | {"num_hidden_layers": layers} | changes)


def memory(case: Case, s: ModelShape) -> MemoryPlan:
    return MemoryPlan(case.recipe, s, ONE_RANK)


def depth(usable: float) -> int:
    """Return the largest number of layers, at least two, with which every case fits."""

    def needed(layers: int) -> int:
        return max(memory(case, shape(layers)).phases["training"] for case in CASES)

    return next(layers for layers in range(36, 1, -1) if layers == 2 or needed(layers) <= usable - SLACK)


def flops(case: Case, s: ModelShape) -> float:
    """Return the FLOPs of forward and backward of what is computed, without recomputation: 6 per weight and token,
    causal attention, and the output matrix for response tokens."""
    group = SharedGroup.of(case.recipe, s, ONE_RANK)
    tokens = case.groups * GROUP / group.count * group.tokens
    matrices = s.multiplied - s.vocabulary * s.hidden
    attention = s.layers * tokens * group.length * s.q
    head = case.groups * GROUP * case.response * s.vocabulary * s.hidden
    return 6 * (matrices * tokens + attention + head)


def planned(chip: Device) -> dict[str, dict[str, str]]:
    """Return {check: {figure: text}} by the constants of `plan`, and by floors at its rates."""
    share = Efficiency()
    rate, copied = chip.flops * share.compute, chip.bandwidth * share.memory
    tokens, vocabulary, hidden = LOGPROBS
    product = 2 * tokens * vocabulary * hidden / rate
    logprobs = {
        "forward": f"{product * 1e3:.1f} ms",
        "forward + backward": f"{4 * product * 1e3:.1f} ms",
        "peak memory": f"{(tokens + vocabulary) * hidden * 2 / 2**20:.0f} MiB",
    }
    layers, small = depth(chip.usable), memory(CASES[0], shape(4)).state
    slice_of_8b = {"layers": str(layers)}
    for case in CASES:
        s = shape(layers)
        recipe, group = case.recipe, SharedGroup.of(case.recipe, s, ONE_RANK)
        machine = Machine(chip, share, s, ONE_RANK, False, recipe.megatron.recompute_granularity, keys=group.keys)
        computed = case.groups * GROUP / group.count * group.tokens
        taken = machine.passes(computed, MICRO_BATCH, min(group.length, MICRO_BATCH), True).most
        plan = memory(case, s)
        slice_of_8b |= figures(case, s, chip, taken, plan.phases["training"])
    update = machine.update(plan.state).most
    return {
        "ceilings": {"matrix product": f"{rate / 1e12:.0f} TFLOP/s", "copy on the device": f"{copied / 1e9:.0f} GB/s"},
        "log-probs: time and memory": {f"block {n} MiB: {k}": v for n in (64, 256) for k, v in logprobs.items()},
        "slice of Qwen3-8B": slice_of_8b | {"optimizer's step": f"{update * 1e3:.0f} ms"},
        "weights to an engine process": {"a sync": f"{copied / 2e9:.0f} GB/s"},
        "offload of the trainer": {"memory that it frees": f"{(small.gradients + small.optimizer) / GIB:.2f} GiB"},
    }


def figures(case: Case, s: ModelShape, chip: Device, seconds: float, peak: float) -> dict[str, str]:
    """Return what the slice's check shows of a case."""
    return {
        f"{case.name}: tokens/s": f"{case.tokens / seconds:,.0f}",
        f"{case.name}: MFU": f"{flops(case, s) / seconds / chip.flops:.1%}",
        f"{case.name}: peak memory": f"{peak / GIB:.1f} GiB",
    }


def rehearsed(name: str) -> dict[str, str]:
    """Return the peaks of `megatron-rft rehearse`. Its seconds are of shorter prompts than the cases have."""
    chip, found = DEVICES[name], {}
    layers = depth(chip.usable)
    options = {"gpus": 1, "gpus_per_node": 1, "device": name, "fraction": 1.0, "micro_batches": None}
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        Path(folder, "config.json").write_text(json.dumps(QWEN3_8B | {"num_hidden_layers": layers}))
        for case in CASES:
            given = Namespace(recipe=str(RECIPE), overrides=case.options(folder), training_only=True, **options)
            stage = Rehearsal(given).stage(0, worker)
            found[f"{case.name}: peak memory"] = f"{stage.found['peaks']['training']['total'] / GIB:.1f} GiB"
    return found


def main() -> None:
    table = json.loads(FILE.read_text())
    for name in ("h100", "h200"):
        table[name.upper()] = planned(DEVICES[name])
        table[f"{name.upper()} rehearsed"] = {"slice of Qwen3-8B": rehearsed(name)}
    FILE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
