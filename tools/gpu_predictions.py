"""What `plan`, `rehearse` and floors at the rates of `plan` predict for the checks of gpu_kit.py. No torch.

    python tools/gpu_predictions.py     writes tools/gpu_predicted.json again, rehearsals included: some minutes

The slice has Qwen3-8B's widths and vocabulary, and as many layers as `plan` finds room for.
"""

import functools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron_rft.commands.parser import parse
from megatron_rft.commands.rehearse import Rehearsal, Worker
from megatron_rft.config import Recipe, load
from megatron_rft.plan.devices import DEVICES, GIB, Device, Efficiency
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import MemoryPlan
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.seconds import Machine
from megatron_rft.plan.shared_prompts import SharedGroup

ROOT = Path(__file__).resolve().parents[1]
FILE, RECIPE = ROOT / "tools" / "gpu_predicted.json", ROOT / "examples" / "quickstart" / "pipo.yaml"
WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
QWEN3_8B = dict(zip(WIDTHS, (151936, 4096, 12288, 32, 8, 128), strict=True)) | {"tie_word_embeddings": False}
QWEN3_8B |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960}
SLACK = 6 * GIB  # left free beside what `plan` counts: gaps of the allocator, and what libraries take
GROUP, MICRO_BATCH = 8, 9216
RECOMPUTE = ("granularity=full", "method=uniform", "num_layers=1")
ONE_RANK, SHARES = Layout(1, 1, 1, 1, 1, 1), Efficiency()
LOGPROBS = 4096, 151936, 4096  # tokens, vocabulary, hidden size
OFFLOADED = QWEN3_8B | {"num_hidden_layers": 2, "vocab_size": 8192}  # 5 GiB to pin, at a second a GB
FREED = "memory that it frees of 2 layers"


@dataclass(frozen=True)
class Case:
    """An update of the slice: `groups` of 8 responses to a prompt, lengths in tokens."""

    prompt: int
    response: int
    groups: int
    shared: bool
    recompute: bool

    def __str__(self) -> str:
        recompute = ", recompute" if self.recompute else ""
        return f"{GROUP} x {self.prompt:,} + {self.response}, prompts {'shared' if self.shared else 'apart'}{recompute}"

    def options(self, model: str) -> list[str]:
        """Options of the recipe whose update is this case. No reference computes beside the policy."""
        given = f"""model.path={model} model.precision=bf16 pipo=null rollout.engine=hf algorithm.kl_coefficient=0
            data.max_prompt_tokens={self.prompt} rollout.max_response_tokens={self.response}
            rollout.prompts_per_step={self.groups} rollout.group_size={GROUP} batching.micro_batch_tokens={MICRO_BATCH}
            batching.share_prompts={"auto" if self.shared else "off"}"""
        return [*given.split(), *(f"megatron.recompute_{each}" for each in RECOMPUTE * self.recompute)]

    @functools.cached_property
    def recipe(self) -> Recipe:
        return load(RECIPE, self.options("model"))

    def memory(self, s: ModelShape) -> MemoryPlan:
        return MemoryPlan(self.recipe, s, ONE_RANK)

    def computed(self, s: ModelShape) -> tuple[SharedGroup, float]:
        """Return the group whose prompt is computed once, and the tokens of the batch that are computed."""
        group = SharedGroup.of(self.recipe, s, ONE_RANK)
        return group, self.groups * GROUP / group.count * group.tokens

    def figures(self, s: ModelShape, chip: Device, seconds: float, peak: float) -> dict[str, str]:
        """Return what the check shows. FLOPs are those of forward and backward of what is computed, without
        recomputation: 6 per weight and token, causal attention, and the output matrix for response tokens."""
        (group, tokens), responses = self.computed(s), self.groups * GROUP
        head = s.vocabulary * s.hidden
        layers = (s.multiplied - head + s.layers * group.length * s.q) * tokens
        flops = 6 * (layers + responses * self.response * head)
        whole = responses * (self.prompt + self.response)  # as if no prompt was shared
        return {
            f"{self}: tokens/s": f"{whole / seconds:,.0f}",
            f"{self}: MFU": f"{flops / seconds / chip.flops:.1%}",
            f"{self}: peak memory": f"{peak / GIB:.1f} GiB",
        }


@functools.cache
def cases(shorter: int = 1) -> list[Case]:
    sizes = ((1024 // shorter, 128 // shorter, 4), (4096 // shorter, 512 // shorter, 1))
    return [Case(*size, shared, again) for size in sizes for shared in (False, True) for again in (False, True)]


def shape(layers: int) -> ModelShape:
    return ModelShape(QWEN3_8B | {"num_hidden_layers": layers})


def needed(layers: int) -> int:
    return max(case.memory(shape(layers)).phases["training"] for case in cases())


def depth(usable: float) -> int:
    """Return the largest number of layers, at least two, with which every case fits."""
    return next((layers for layers in range(36, 2, -1) if needed(layers) <= usable - SLACK), 2)


def planned_slice(chip: Device) -> dict[str, str]:
    s = shape(depth(chip.usable))
    found = {"layers": str(s.layers)}
    for case in cases():
        (group, tokens), plan = case.computed(s), case.memory(s)
        machine = Machine(chip, SHARES, s, ONE_RANK, False, "full" if case.recompute else None, keys=group.keys)
        taken = machine.passes(tokens, MICRO_BATCH, min(group.length, MICRO_BATCH), True).most
        found |= case.figures(s, chip, taken, plan.phases["training"])
    return found | {"optimizer's step": f"{machine.update(plan.state).most * 1e3:.0f} ms"}


def planned(chip: Device) -> dict[str, dict[str, str]]:
    """Return {check: {figure: text}} by the constants of `plan`, and by floors at its rates."""
    rate, copied = chip.flops * SHARES.compute, chip.bandwidth * SHARES.memory
    tokens, vocabulary, hidden = LOGPROBS
    product = 2 * tokens * vocabulary * hidden / rate * 1e3
    logprobs = {"forward": f"{product:.1f} ms", "forward + backward": f"{4 * product:.1f} ms"}
    logprobs["peak memory"] = f"{(tokens + vocabulary) * hidden * 2 / 2**20:.0f} MiB"
    state = cases()[0].memory(ModelShape(OFFLOADED)).state
    return {
        "ceilings": {"matrix product": f"{rate / 1e12:.0f} TFLOP/s", "copy on the device": f"{copied / 1e9:.0f} GB/s"},
        "log-probs: time and memory": {f"block {n} MiB: {k}": v for n in (64, 256) for k, v in logprobs.items()},
        "slice of Qwen3-8B": planned_slice(chip),
        "weights to an engine process": {"a sync": f"{copied / 2e9:.0f} GB/s"},
        "offload of the trainer": {FREED: f"{(state.gradients + state.optimizer) / GIB:.2f} GiB"},
    }


def rehearsed(name: str) -> dict[str, str]:
    """Return the peaks of `megatron-rft rehearse`. Its seconds are of shorter prompts than the cases have."""
    found, model = {}, QWEN3_8B | {"num_hidden_layers": depth(DEVICES[name].usable)}
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        Path(folder, "config.json").write_text(json.dumps(model))
        for case in cases():
            words = f"--device {name} --training-only --gpus 1 --fraction 1".split()
            words = ["rehearse", str(RECIPE), *case.options(folder), *words]
            peak = Rehearsal(parse(words)).stage(0, worker).found["peaks"]["training"]["total"]
            found[f"{case}: peak memory"] = f"{peak / GIB:.1f} GiB"
    return found


if __name__ == "__main__":
    table = {
        name.upper(): {"plan and floors": planned(DEVICES[name]), "rehearse": {"slice of Qwen3-8B": rehearsed(name)}}
        for name in ("h100", "h200")
    }
    FILE.write_text(json.dumps(table, indent=1) + "\n")
