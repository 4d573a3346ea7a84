"""`megatron-rft diagnose`: whether the mismatch of engine and trainer is rounding or a bug, and whose.

training/diagnosis.py measures, on as many ranks as `--nproc` says; this file launches, prints the table and concludes.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_rft.commands.convert import find_source
from megatron_rft.commands.train import check_user_code, fetch_models, work
from megatron_rft.config import load
from megatron_rft.launching import ranks as launcher
from megatron_rft.plan import check, make_folder
from megatron_rft.training import diagnosis
from megatron_rft.training.diagnosis import EXACT, FLOORS, MEASURED
from megatron_rft.utils.errors import FAILED, FINISHED, ConfigError
from megatron_rft.utils.files import write_atomically


def run(args: argparse.Namespace) -> int:
    """Returns the exit status: FAILED if there is a bug."""
    recipe, (world, per_node, node) = args.loaded, launcher.check_environment(args.nproc)
    if recipe.trainer != "rl":
        raise ConfigError(f"trainer: {recipe.trainer} compares no engine with the trainer: diagnose takes trainer rl")
    if recipe.rollout.servers:
        raise ConfigError("rollout.servers: diagnose needs engines in two precisions: leave it out, and it starts them")
    if "RANK" in os.environ and launcher.PARENT not in os.environ:
        raise ConfigError("RANK is set: start diagnose once on each node, with --nproc")
    if args.run and not (args.run / "checkpoints").is_dir():
        raise ConfigError(f"--run: {args.run} has no checkpoints; without --run the start weights are compared")
    folder = (args.run or Path(recipe.run.output_dir)) / "diagnosis"
    args.overrides.append(f"run.output_dir={json.dumps(str(folder))}")
    if "RANK" in os.environ:
        return work(str(folder), lambda: measure(args))
    check_user_code(recipe.algorithm, recipe.setting, recipe.environment, recipe.reward)
    fetch_models({"model.path": recipe.model.path}, recipe.model.tokenizer)
    print(check(recipe, world, per_node, starts=True), flush=True)
    make_folder(str(folder))
    command = [sys.executable, "-m", "megatron_rft", "diagnose", args.recipe, *args.overrides[:-1]]
    command += ["--prompts", str(args.prompts), *(["--run", str(args.run)] if args.run else [])]
    if args.nproc:
        status = launcher.launch(command, args.nproc, str(folder), node, None, recipe.faults)
    else:
        status = work(str(folder), lambda: measure(args))
    if status != FINISHED:
        return status
    measured = json.loads((folder / MEASURED).read_text())
    measured["verdict"] = verdict(measured)
    write_atomically(folder / "diagnosis.json", json.dumps(measured, indent=1) + "\n")
    where = f"{folder / 'diagnosis.json'} has these numbers"
    print("\n".join([*table(measured["rows"]), "", measured["verdict"], where]))
    return FAILED if measured["bug"] else FINISHED


def measure(args: argparse.Namespace) -> int:
    lookup = find_source(str(args.run), option="--run").open() if args.run else None
    diagnosis.run(lambda *more: load(args.recipe, [*args.overrides, *more]), lookup, args.prompts)
    return FINISHED


def table(rows: list[dict[str, Any]]) -> list[str]:
    width = max(len(row["name"]) for row in rows)
    lines = [f"{row['name']:{width}}  {row['kl']:8.1e}  {row['max']:8.1e}  {row['share']:6.1%}" for row in rows]
    return [f"{'':{width}}  {'KL':>8}  {'largest':>8}  {'share':>6}", *lines]


def verdict(measured: dict[str, Any]) -> str:
    """One sentence."""
    base, floor = measured["base"], measured["floor"]
    in_fp32 = f"(KL {measured['in_fp32']:.1e} with both sides in fp32)"
    if measured["bug"]:
        return f"A bug, not rounding {in_fp32}: {measured['bug']}."
    right = f"weights, tokens, masks and temperature are right {in_fp32}"
    if "by_engine" not in measured:
        return f"Rounding: {right}, and the recipe computes in fp32."
    if base <= EXACT:
        return f"Rounding: {right}, and the KL of {base:.1e} in the recipe's precision is next to nothing."
    if base <= FLOORS * floor:
        return f"Rounding: {right}, and {base:.1e} is at most {FLOORS} times the trainer's KL from itself, {floor:.1e}."
    by_engine, by_trainer = measured["by_engine"], measured["by_trainer"]
    side = "the engine" if by_engine > 2 * by_trainer else "the trainer" if by_trainer > 2 * by_engine else "both sides"
    return f"Rounding, of {side}: {right}. An option without which the KL is half of {base:.1e} is the cause."
