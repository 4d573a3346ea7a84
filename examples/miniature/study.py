"""A comparison of training methods in miniature, decided before its runs. `pipo.py`, `fpa.py` and `dynamic.py` use it.

1. Search: every arm is trained at each of its learning rates, once per search seed. The rate with the best mean pass@1
   on the test problems is the arm's. These seeds are not used again.
2. Test: every arm is trained at its own rate, once per seed. Seeds are paired: the same seed gives both arms the same
   data order and the same warm start.
3. Result: the mean of each arm, and of the difference from the arm that it is compared with, with the 95% interval of
   Student's t over seeds. An interval that contains 0 shows nothing.

Writes rates.json, table.md and curves.png into OUT/REGIME. Restarted, it keeps finished runs. `--rates` has other rates
for all arms, for example one above the best: a single one needs no search. Results go into OUT/REGIME/rates_LR, so that
they do not replace those of the study.
"""

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev

EXAMPLES = Path(__file__).resolve().parents[1]
SMOLLM2 = EXAMPLES / "smollm2"
SEARCH_SEEDS, SEEDS = (100, 101), (0, 1, 2, 3, 4)
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # two-sided, of 1 to 9 degrees of freedom
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True)
class Arm:
    """One method. `against`: the arm from which its difference is taken."""

    name: str
    recipe: Path
    rates: tuple[float, ...]
    options: tuple[str, ...] = ()
    against: str | None = None
    rate_keys: tuple[str, ...] = ("optimizer.lr",)  # what a rate sets

    def at(self, rate: float) -> list[str]:
        return [*self.options, *(f"{key}={rate:g}" for key in self.rate_keys)]


@dataclass
class Study:
    out: Path
    arms: list[Arm]
    shared: list[str] = field(default_factory=list)  # options of every run
    seeds: tuple[int, ...] = SEEDS
    search_seeds: tuple[int, ...] = SEARCH_SEEDS
    jobs: int = 1  # runs at the same time
    results: Path | None = None  # a folder for the tables, default: out

    @property
    def tables(self) -> Path:
        return self.results or self.out

    def run(self) -> str:
        """Run all missing runs, then write the table."""
        rates = self.search()
        self.train_all((arm, rates[arm.name], seed) for seed in self.seeds for arm in self.arms)
        return self.report(rates)

    def search(self) -> dict[str, float]:
        searched = [arm for arm in self.arms if len(arm.rates) > 1]
        self.train_all((arm, rate, seed) for seed in self.search_seeds for arm in searched for rate in arm.rates)
        rates = {}
        for arm in self.arms:
            folders = {rate: [self.folder(arm, rate, seed) for seed in self.search_seeds] for rate in arm.rates}
            scores = {rate: fmean(map(final, runs)) for rate, runs in folders.items()} if arm in searched else {}
            rates[arm.name] = max(scores, key=scores.get) if scores else arm.rates[0]
            note(self.tables / "rates.json", arm.name, {f"{rate:g}": score for rate, score in scores.items()})
        return rates

    def folder(self, arm: Arm, rate: float, seed: int) -> Path:
        return self.out / arm.name / f"rate_{rate:g}" / f"seed_{seed}"

    def train_all(self, runs: Iterable[tuple[Arm, float, int]]) -> None:
        with ThreadPoolExecutor(self.jobs) as pool:
            for _ in pool.map(lambda each: self.train(*each), runs):  # an error cancels the runs that have not begun
                pass

    def train(self, arm: Arm, rate: float, seed: int) -> Path:
        own = f"run.seed={seed}", f"run.name={arm.name}"  # figures name the arms by it
        return train(arm.recipe, self.folder(arm, rate, seed), *self.shared, *arm.at(rate), *own)

    def report(self, rates: dict[str, float]) -> str:
        folders = {arm.name: [self.folder(arm, rates[arm.name], seed) for seed in self.seeds] for arm in self.arms}
        text = table(self.arms, rates, {name: [final(each) for each in runs] for name, runs in folders.items()})
        (self.tables / "table.md").write_text(text)
        return text


def train(recipe: Path, folder: Path, *options: str, command: str = "train", done: str = "export") -> Path:
    """Train one run, unless it is finished; its output goes to FOLDER.log. Exits if the run fails."""
    if not (folder / done).exists():
        line = [sys.executable, "-m", "megatron_rft", command, str(recipe), *options, f"run.output_dir={folder}"]
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_suffix(".log").open("a") as log:
            ended = subprocess.run(line, env=os.environ | ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT)
        if ended.returncode:
            raise SystemExit(f"{folder} failed with status {ended.returncode}: see {log.name}")
        print(folder, flush=True)
    return folder


def warm_start(recipes: Path, out: Path) -> Path:
    """Train a new model on demonstrations, with `recipes`/warm.yaml. Returns its folder."""
    if not (out / "model" / "config.json").exists():
        subprocess.run([sys.executable, str(EXAMPLES / "miniature" / "make_model.py"), str(out / "model")], check=True)
    return train(recipes / "warm.yaml", out / "warm", f"model.path={out / 'model'}") / "export"


def smollm2(out: Path) -> dict[str, Path]:
    """Make the folder of SmolLM2-135M-Instruct and its problems where they are missing. Returns the places by name."""
    made = {name: out / f"smollm2_{name}" for name in ("model", "problems")}
    for name, folder in made.items():
        subprocess.run([sys.executable, str(SMOLLM2 / f"make_{name}.py"), str(folder)], check=True)
    return made | {part: made["problems"] / f"{part}.jsonl" for part in ("train", "test")}


def model_options(regime: str, recipes: Path, out: Path) -> list[str]:
    """Options of every run: the model warm-started with `recipes`, or SmolLM2-135M-Instruct and its problems."""
    if regime != "smollm2":
        return [f"model.path={warm_start(recipes, out)}"]
    places = smollm2(out)
    return [f"model.path={places['model']}", f"data.train={places['train']}", f"data.test={places['test']}"]


def tested(folder: Path) -> list[float]:
    """pass@1 on the test problems, before and after."""
    found = sorted((folder / "evaluation").glob("test_step_*/results.json"))
    return [json.loads(path.read_text())[0]["pass_at_1"] for path in found]


def final(folder: Path) -> float:
    return tested(folder)[-1]


def note(path: Path, name: str, value: object) -> None:
    """Adds an entry to a JSON file."""
    content = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | {name: value}, indent=2) + "\n")


def interval(values: list[float]) -> tuple[float, float]:
    """(mean, half the width of its 95% interval) of independent values."""
    if len(values) < 2:
        return fmean(values), math.inf
    return fmean(values), T_95[len(values) - 2] * stdev(values) / math.sqrt(len(values))


def table(arms: list[Arm], rates: dict[str, float], finals: dict[str, list[float]]) -> str:
    """Markdown. `finals`: pass@1 of each seed, in the same order for every arm."""
    count = len(next(iter(finals.values())))
    lines = [
        f"pass@1 on the test problems after training, {count} seeds: mean and standard deviation over seeds, "
        "the lowest seed, and the paired difference with its 95% interval.",
        "",
        "| arm | rate | pass@1 | std | lowest | difference | from |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm in arms:
        values = finals[arm.name]
        spread = f"{stdev(values):.3f}" if count > 1 else "–"
        paired = [a - b for a, b in zip(values, finals.get(arm.against or "", values), strict=True)]
        mean, half = interval(paired)
        shown = f"{mean:+.3f} ± {half:.3f}" if arm.against in finals else "–"
        cells = [arm.name, f"{rates[arm.name]:g}", f"{fmean(values):.3f}", spread, f"{min(values):.3f}", shown]
        lines.append("| " + " | ".join([*cells, arm.against or "–"]) + " |")
    return "\n".join(lines) + "\n"


def parser(doc: str, out: str, regimes: Iterable[str]) -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--out", type=Path, default=Path(out), metavar="FOLDER", help=f"default: {out}")
    top.add_argument("--regime", choices=list(regimes), default=next(iter(regimes)), help="default: %(default)s")
    top.add_argument("--only", nargs="+", metavar="ARM", help="these arms (default: all)")
    top.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS), metavar="N", help="up to ten")
    top.add_argument("--rates", type=float, nargs="+", metavar="LR", help="of all arms; with one there is no search")
    top.add_argument("--search-seeds", type=int, nargs="+", default=list(SEARCH_SEEDS), metavar="N")
    top.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N", help="runs at once; default: %(default)s")
    top.add_argument("overrides", nargs="*", default=[], metavar="section.option=value", help="of every run")
    return top


def check_overrides(out: Path, overrides: list[str]) -> None:
    """Refuse a folder whose finished runs, which would be kept, had other options."""
    path, given = out / "overrides.json", sorted(overrides)
    before = json.loads(path.read_text()) if path.exists() else {"overrides": given}
    if before["overrides"] != given:
        was = " ".join(before["overrides"]) or "none"
        raise SystemExit(f"{out} has runs with other overrides ({was}): give another folder with --out")
    note(path, "overrides", given)


def main(
    args: argparse.Namespace, arms: list[Arm], shared: list[str], draw: Callable[[list[Path], Path], Path]
) -> None:
    """Run the study of the chosen arms in OUT/REGIME; print its table and draw its figure."""
    if unknown := set(args.only or []) - {arm.name for arm in arms}:
        raise SystemExit(
            f"--only: there is no {', '.join(sorted(unknown))}. There are: {', '.join(a.name for a in arms)}"
        )
    chosen = [arm for arm in arms if not args.only or arm.name in args.only]
    out = results = args.out / args.regime
    if args.rates:
        chosen = [replace(arm, rates=tuple(args.rates)) for arm in chosen]
        results = out / "_".join(["rates", *(f"{rate:g}" for rate in args.rates)])
    check_overrides(out, args.overrides)
    options, seeds = [*shared, *args.overrides], (tuple(args.seeds), tuple(args.search_seeds))
    study = Study(out, chosen, options, *seeds, args.jobs, results)
    print(study.run())
    rates = study.search()
    folders = [study.folder(arm, rates[arm.name], seed) for arm in chosen for seed in study.seeds]
    print(draw(folders, study.tables / "curves.png"))
