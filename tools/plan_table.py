"""Compares the planned memory of every shipped recipe with the rehearsed memory, at the full depth of its model.

python -m tools.plan_table [--whole] [--each] [WORD]

The peak of an update is affine in the number of layers: the table continues it from rehearsals with 2 and with 4
layers, or with one and two periods of a model whose kinds of layer alternate. Of a pipeline it has the first stage.
`--whole` rehearses all layers instead. Recipes of one `kind` are rehearsed once; with `--each`, every recipe
that differs in more than seeds, data and rates. WORD: only recipes whose path has it.
"""

import argparse
import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron_rft.commands.parser import parse
from megatron_rft.commands.rehearse import Rehearsal, Worker
from megatron_rft.config import load
from megatron_rft.config.recipe import Recipe
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import GIB, update_memory
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.plan.shared_prompts import SharedGroup
from tests.unit.plan.test_shipped_recipes import GPUS, MODELS, name, nodes_of, recipes

PLAN = "plan"
UPDATES = ("training", "critic's training")


def kind(recipe: Recipe, nodes: int, each: bool = False) -> str:
    """Return what decides the memory of an update. `each`: with all options of the algorithm that are on."""
    algorithm, constraint = recipe.algorithm, recipe.constraint
    loss: Any = [algorithm.compares_distributions, bool(getattr(algorithm, "entropy_coefficient", 0))]
    if each:
        loss = {name: bool(v) if isinstance(v, int | float) else v for name, v in algorithm.model_dump().items()}
    refines = bool(constraint) and constraint.refines and constraint.mode == "loss"
    rollout, lengths = recipe.rollout, (recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens)
    parts = [recipe.model, recipe.megatron, recipe.batching, recipe.trainer, bool(recipe.critic), bool(recipe.pipo)]
    return repr([*parts[: 6 if each else 5], nodes, lengths, rollout.group_size, refines, loss])


def kinds(each: bool = False) -> dict[str, list[Path]]:
    """Return the shipped recipes with a training step by their `kind`."""
    found: dict[str, list[Path]] = {}
    for path in recipes():
        if (recipe := load(path)).trainer != "generate":
            found.setdefault(kind(recipe, nodes_of(path), each), []).append(path)
    return found


def rehearsed(worker: Worker, path: Path, layers: int) -> dict[str, float]:
    """Rehearse an update of the recipe on its nodes with so many layers. Return its bytes by phase, and planned."""
    with tempfile.TemporaryDirectory() as folder:
        model = copy.deepcopy(MODELS[load(path).model.path])
        model.get("text_config", model)["num_hidden_layers"] = layers
        Path(folder, "config.json").write_text(json.dumps(model))
        words = ["rehearse", str(path), f"model.path={folder}", "--gpus", str(GPUS * nodes_of(path))]
        stages = load(path).megatron.pipeline_model_parallel_size
        rehearsal = Rehearsal(parse([*words, "--micro-batches", str(stages), "--training-only"]))
        stage = rehearsal.stage(0, worker)
    peaks = {phase: stage.found["peaks"][phase]["total"] for phase in UPDATES if phase in stage.found["peaks"]}
    largest = max(stage.found["largest"][phase] for phase in peaks)
    return peaks | {PLAN: planned(rehearsal.recipe, rehearsal.sizes, rehearsal.layout, largest)}


def planned(recipe: Recipe, s: ModelShape, layout: Layout, tokens: int) -> float:
    """Return the plan's bytes of an update of the first stage. `tokens`: of the largest micro-batch of a rank."""
    batching = recipe.batching.model_copy(update={"micro_batch_tokens": tokens * layout.cp})
    keys = SharedGroup.of(recipe.model_copy(update={"batching": batching}), s, layout, 0.5).keys
    state, activations = update_memory(recipe, batching, keys, s, layout, 0)
    return state.total + activations


def at_full_depth(worker: Worker, path: Path, whole: bool = False) -> tuple[float, float]:
    """Return (planned, rehearsed) bytes of an update with all layers."""
    whole_model = MODELS[load(path).model.path]
    model = whole_model.get("text_config", whole_model)
    least = 4 if "vision_config" in whole_model else 2  # Qwen3-VL's tower enters three layers
    layers, period = model["num_hidden_layers"], model.get("full_attention_interval", least)
    if whole:
        found = rehearsed(worker, path, layers)
    else:
        few, more = (rehearsed(worker, path, number) for number in (period, 2 * period))
        steps = (layers - period) / period
        found = {name: few[name] + steps * (more[name] - few[name]) for name in few}  # the plan is affine as well
    return found.pop(PLAN), max(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--each", action="store_true")
    parser.add_argument("word", nargs="?", default="")
    args = parser.parse_args()
    print("| recipe | and as it | planned, GiB | rehearsed, GiB | ratio |\n|---|---|---|---|---|", flush=True)
    with Worker() as worker:
        for paths in kinds(args.each).values():
            if args.word in name(paths[0]):
                plan, found = at_full_depth(worker, paths[0], args.whole)
                row = f"{plan / GIB:.2f} | {found / GIB:.2f} | {plan / found:.3f} |"
                print(f"| {name(paths[0])} | {len(paths) - 1 or ''} | {row}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
