"""What PIPO adds to a step's wall time: engines in the ranks, and in processes of their own.

    python tools/bench/pipo_overlap.py [--out FOLDER] [--model FOLDER] [--rounds 3] [--steps 16] [option=value ...]

One rank on the quickstart's recipe and model, with random weights, responses of 20 tokens as the warm-started model
writes them, and random rewards. The learning rates are so small that all steps have equal work. Runs with and without
PIPO alternate; seconds are medians of a run's steps, shares are compared round by round, medians over the rounds.

A dash: no step had such a phi; take more --steps. "more" counts seven steps with phi > 0 for each with phi < 0, as in
docs/online.md. "old log-probs": the forward pass that PIPO adds to a base with one step per batch. "floor": that pass,
and as much of a verification (as long as the colocated run's) as does not fit into the generation of a run without
PIPO; with colocated engines all of it.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import zlib
from pathlib import Path
from statistics import median

from megatron_rft.records import Prompt

SMALLEST = """--out {out} --model {model} --rounds 1 --steps 10
    rollout.prompts_per_step=2 rollout.group_size=4 rollout.max_response_tokens=4"""  # tests/bench
RECIPE = Path(__file__).resolve().parents[2] / "examples/quickstart/pipo.yaml"
WINDOW = 2
SETTING = (
    "model.initialise=random rollout.engine=hf rollout.max_response_tokens=20 optimizer.lr=1e-12 data.validation=null "
    "data.test=null evaluation.every=0 checkpoint.every=0 reward.kind=own "
    "batching.skip_zero_advantages=off "
    f"reward.function={Path(__file__).resolve()}:random_reward"
).split()
PIPO = (f"pipo.window={WINDOW}", "pipo.learning_rate=1e-12")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
PHASES = ("step", "generation", "logprobs", "verification")
RISES = 7 / 8


def random_reward(prompt: Prompt, text: str) -> float:
    """0 or 1, the same in every run."""
    return float(zlib.crc32(f"{prompt.index} {text}".encode()) % 2)


def run(folder: Path, *options: str) -> list[dict[str, float]]:
    """The log of the steps after the first two, which are slower, and those of the window."""
    command = [sys.executable, "-m", "megatron_rft", "train", str(RECIPE), f"run.output_dir={folder}", *options]
    done = subprocess.run([*command, "--nproc", "1"], env=os.environ | ENVIRONMENT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["step"] > max(WINDOW, 2)]


def seconds(lines: list[dict[str, float]]) -> dict[str, float]:
    """Medians, not a number where there are no lines; a checkpoint, of the last step alone, is not counted."""
    if not lines:
        return dict.fromkeys(PHASES, math.nan)
    found = {name: median(line.get(f"seconds/{name}", 0.0) for line in lines) for name in PHASES}
    return found | {"step": median(line["seconds/step"] - line.get("seconds/checkpoint", 0.0) for line in lines)}


def compare(folder: Path, options: list[str]) -> dict[str, dict[str, float]]:
    """One round: placement -> shares of the step without PIPO, and that step's seconds."""
    found, pass_seconds = {}, 0.0
    for placement in ("colocated", "process"):
        place = f"rollout.placement={placement}"
        without = seconds(run(folder / placement, *options, place, "pipo=null"))
        lines = run(folder / f"{placement}_pipo", *options, place, *PIPO)
        rises, falls = ([line for line in lines if line.get(f"pipo/{kind}")] for kind in ("reinforced", "suppressed"))
        rise, fall = seconds(rises), seconds(falls)
        pass_seconds = pass_seconds or seconds(rises or falls)["verification"]
        logprobs = seconds(lines)["logprobs"] - without["logprobs"]
        left = pass_seconds if placement == "colocated" else max(0.0, pass_seconds - without["generation"])
        more = {"rise": rise["step"], "fall": fall["step"]}
        more["more"] = RISES * rise["step"] + (1 - RISES) * fall["step"]
        shares = {name: value / without["step"] - 1 for name, value in more.items()}
        shares |= {"logprobs": logprobs / without["step"], "floor": (logprobs + left) / without["step"]}
        found[placement] = shares | {"without": without["step"], "generation": without["generation"]}
    return found


def percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:+.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench/pipo_overlap"))
    parser.add_argument("--model", type=Path, help="default: the quickstart's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("overrides", nargs="*", help="section.option=value, for every run")
    args = parser.parse_args()
    model = args.model or args.out / "model"
    if args.model is None:
        from setups import arithmetic  # not at the top: a run's reward process imports this file, too

        arithmetic.write_model_folder(model)
    options = [*SETTING, f"model.path={model}", f"run.steps={args.steps}", *args.overrides]
    rounds = [compare(args.out / str(number), options) for number in range(args.rounds)]
    print("| engines | without, s | of it generation | more | phi > 0 | phi < 0 | old log-probs | floor |")
    print("|---|---|---|---|---|---|---|---|")
    for placement in rounds[0]:
        middle = {name: median(each[placement][name] for each in rounds) for name in rounds[0][placement]}
        shares = [percent(middle[name]) for name in ("more", "rise", "fall", "logprobs", "floor")]
        print(f"| {placement} | {middle['without']:.2f} | {middle['generation']:.2f} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
