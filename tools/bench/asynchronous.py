"""Compares sampling ahead with alternating sampling and training: wall time per step and learning, on miniature
arithmetic.

    python tools/bench/asynchronous.py [--out FOLDER] [--seeds 0 1 2] [--staleness 0 1 2] [--steps 30]

One rank and one engine process with the hf engine, GRPO with truncated importance weights, from one warm start; runs go
one after the other, the variants of a seed in turn, so that all of them see the same machine. Prints docs/rollout.md's
table. Started again it goes on: finished runs stay.
"""

import argparse
import sys
from pathlib import Path
from statistics import mean, median, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from examples.miniature.pipo import RECIPES
from examples.miniature.study import final, train, warm_start
from megatron_rft.tracking.metrics import read_metrics

SMALLEST = """--out {out} --start {model} --seeds 0 --staleness 0 1 --steps 3
    rollout.prompts_per_step=2 rollout.max_response_tokens=4
    algorithm.mini_batch_prompts=2 evaluation.limit=2"""  # tests/bench


def curve(folder: Path, name: str) -> list[float]:
    return [line[name] for line in read_metrics(folder / "metrics.jsonl") if name in line]


def cell(values: list[float], digits: int) -> str:
    spread = f" ± {stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}"


def row(runs: Path, staleness: int, seeds: list[int]) -> str:
    folders = [runs / f"staleness_{staleness}_{seed}" for seed in seeds]
    step = [median(curve(folder, "seconds/step")[2:]) for folder in folders]
    waiting = [median(curve(folder, "seconds/generation")[2:]) for folder in folders]
    rewards = [curve(folder, "reward/mean") for folder in folders]
    thirds = [[mean(each[i * len(each) // 3 : (i + 1) * len(each) // 3]) for each in rewards] for i in range(3)]
    stale = mean(mean(curve(folder, "rollout/staleness")) for folder in folders)
    learnt = [final(folder) for folder in folders]
    cells = [cell(step, 2), cell(waiting, 2), f"{stale:.2f}", *(cell(third, 3) for third in thirds), cell(learnt, 3)]
    return f"| {staleness} | " + " | ".join(cells) + " |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("runs/bench/asynchronous"))
    options.add_argument(
        "--start", type=Path, help="the model to start from; default: a warm start that is trained first"
    )
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--steps", type=int, default=30)
    options.add_argument("overrides", nargs="*", help="section.option=value, for every run")
    args = options.parse_args()

    start = args.start or warm_start(RECIPES, args.out)
    runs = args.out / "runs"
    common = ["rollout.engine=hf", "rollout.placement=process", "algorithm.importance=truncated", *args.overrides]
    for seed in args.seeds:
        for staleness in args.staleness:
            own = [f"rollout.staleness={staleness}", f"run.seed={seed}", f"run.steps={args.steps}"]
            train(RECIPES / "grpo.yaml", runs / f"staleness_{staleness}_{seed}", f"model.path={start}", *common, *own)
    print("| staleness | s / step | of it waiting | mean staleness | reward, 1st third | 2nd | 3rd | pass@1 after |")
    print("|---|---|---|---|---|---|---|---|")
    for staleness in args.staleness:
        print(row(runs, staleness, args.seeds))


if __name__ == "__main__":
    main()
