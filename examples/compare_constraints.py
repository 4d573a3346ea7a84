"""Figures 4 and 7 in miniature: PPO or DAPO without a constraint, with a static and with a dynamic one.

    python examples/compare_constraints.py [--method ppo|dapo] [--out FOLDER] [--seeds 0 1 2] [--ablations] [--jobs 2]
                                           [section.option=value ...]

A model of 0.2 M parameters learns careless arithmetic, and to refine; from this one warm start the three recipes of the
method, in examples/dynamic/tiny, train it, once per seed, in a process of its own, `--jobs` at a time. Writes
FOLDER/METHOD/table.md and figure_4.png, and with --ablations the first seed's eta and filter in figure_7.png. Started
again it goes on where it was.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

from megatron_rft.tracking.metrics import read_metrics

RECIPES = Path(__file__).parent / "dynamic" / "tiny"
METHODS = {"ppo": RECIPES, "dapo": RECIPES / "dapo"}
KINDS = ("none", "static", "dynamic")
ABLATIONS = {
    "eta_0.005": ["constraint.eta=0.005"],
    "eta_0.5": ["constraint.eta=0.5"],
    "no_filter": ["constraint.filter=false"],
}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}


def draw(folders: list[Path], picture: Path) -> Path:
    script = RECIPES.parents[1] / "figures.py"
    subprocess.run([sys.executable, str(script), "constraints", *map(str, folders), "--out", str(picture)], check=True)
    return picture


def train(recipe: Path, folder: Path, *overrides: str) -> Path:
    """One run to its end; its output goes into FOLDER.log."""
    if not (folder / "export" / "model.safetensors").exists():
        command = [sys.executable, "-m", "megatron_rft", "train", str(recipe), *overrides]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".log").open("a") as log:
            done = subprocess.run(
                [*command, f"run.output_dir={folder}"],
                env=os.environ | ENVIRONMENT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        if done.returncode:
            raise SystemExit(f"{recipe.stem} failed with status {done.returncode}: see {log.name}")
    print(f"{folder.name}: {tested(folder)[-1]:.3f}", flush=True)
    return folder


def warm_start(out: Path) -> Path:
    if not (out / "model" / "config.json").exists():
        subprocess.run([sys.executable, str(RECIPES / "make_model.py"), str(out / "model")], check=True)
    return train(RECIPES / "warm.yaml", out / "warm", f"model.path={out / 'model'}") / "export"


def tested(folder: Path) -> list[float]:
    """pass@1 on the test problems, before and after."""
    found = sorted((folder / "evaluation").glob("test_step_*/results.json"))
    return [json.loads(path.read_text())[0]["pass_at_1"] for path in found]


def last(folder: Path, name: str, count: int = 5) -> float:
    values = [line[name] for line in read_metrics(folder / "metrics.jsonl") if line.get(name) is not None]
    return mean(values[-count:]) if values else float("nan")


def share_refining(folder: Path) -> float:
    lines = read_metrics(folder / "metrics.jsonl")
    seconds = [sum(line.get(name, 0.0) for line in lines) for name in ("seconds/refine", "seconds/step")]
    return seconds[0] / seconds[1]


def cell(values: list[float]) -> str:
    spread = f" ± {stdev(values) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


def row(name: str, folders: list[Path]) -> str:
    columns = (lambda f: tested(f)[-1], lambda f: last(f, "reward/mean"), lambda f: last(f, "constraint/kl"))
    cells = [cell([column(folder) for folder in folders]) for column in columns]
    dynamic = read_metrics(folders[0] / "metrics.jsonl")[-1].get("constraint/improved") is not None
    improved = cell([last(folder, "constraint/improved") for folder in folders]) if dynamic else "–"
    refining = f"{100 * mean(map(share_refining, folders)):.0f} %" if dynamic else "–"
    return f"| {name} | {' | '.join(cells)} | {improved} | {refining} |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--method", choices=METHODS, default="ppo")
    options.add_argument("--out", type=Path, default=Path("runs/dynamic/tiny"))
    options.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options.add_argument("--ablations", action="store_true", help="also eta and the filter, with the first seed")
    options.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="runs at a time")
    options.add_argument("overrides", nargs="*", default=[], metavar="section.option=value", help="of every run")
    args = options.parse_args()

    model = warm_start(args.out)
    runs, given = args.out / args.method, [f"model.path={model}", *args.overrides]
    refine = f"constraint.template={RECIPES / 'refine.txt'}"
    planned = [(kind, f"{kind}_{seed}", seed, []) for seed in args.seeds for kind in KINDS]
    planned += [("dynamic", name, args.seeds[0], more) for name, more in ABLATIONS.items()] if args.ablations else []
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = []
        for kind, name, seed, more in planned:
            more = [refine, *more] if kind == "dynamic" else more
            jobs.append(
                pool.submit(
                    train, METHODS[args.method] / f"{kind}.yaml", runs / name, *given, *more, f"run.seed={seed}"
                )
            )
        for job in jobs:
            job.result()

    table = [
        f"pass@1 on 200 held-out problems, {tested(runs / f'none_{args.seeds[0]}')[0]:.3f} at the warm start; mean ± "
        f"standard error of {len(args.seeds)} seeds; reward, KL, improvement ratio: means of the last 5 measured.",
        "",
        "| constraint | pass@1 | reward | KL to the reference | improvement ratio | refiner, share of the time |",
        "|---|---|---|---|---|---|",
        *(row(kind, [runs / f"{kind}_{seed}" for seed in args.seeds]) for kind in KINDS),
        *(row(f"dynamic, {name.replace('_', ' ')}", [runs / name]) for name in ABLATIONS if args.ablations),
    ]
    (runs / "table.md").write_text("\n".join(table) + "\n")
    print(
        *table,
        draw([runs / f"{kind}_{seed}" for kind in KINDS for seed in args.seeds], runs / "figure_4.png"),
        sep="\n",
    )
    if args.ablations:
        folders = [runs / f"dynamic_{args.seeds[0]}", *(runs / name for name in ABLATIONS)]
        print(draw(folders, runs / "figure_7.png"))


if __name__ == "__main__":
    main()
