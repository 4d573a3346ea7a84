"""Tables 1 and 2 of FPA's paper in small, on a CPU: one model, one set of trajectories, every method, several seeds.

    python examples/fpa/miniature/run.py [--out runs/miniature] [--seeds 3] [--methods dpo,fpa] [--epochs 1.5]
                                         [--no-long] [--nproc 1] [section.option=value ...]

It warm-starts a small model on imperfect worked answers, samples eight answers to each problem from it, trains every
method on those (the seed is that of the data's order; the trajectories are the same) and tests each. Then it trains
Off-RL and FPA for long and without early stopping: from the same model, and from one whose warm start was shorter, so
that most of its answers are wrong. The options at the end go to every offline run. What is done already is not done
again. Written into the output folder:

    table.md          test pass@1 of each method's best checkpoint: mean over seeds and its standard error
    dynamics.png      Off-RL beside FPA (one seed)
    lambda.png        the same of Off-RL and FPA at every lambda, all seeds
    long_*.png, .md   the long runs, and what became of their accuracy
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev

from megatron_rft.data import arithmetic

HERE = Path(__file__).resolve().parent
MODEL = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
METHODS = {  # tables 1 and 2, figure 5, and two more
    "sft": "{name: rft}",
    "dpo": "{name: dpo}",
    "rpo": "{name: rpo}",
    "kto": "{name: kto}",
    "a_star_po": "{name: a_star_po}",
    "simper": "{name: simper}",
    "ipo": "{name: ipo}",
    "simpo": "{name: simpo}",
    "off_rl": "{name: off_rl, part_norms_every: 10}",
    "fpa": "{name: fpa, part_norms_every: 10}",
    "off_rl_low_lr": "{name: off_rl}",
    "off_rl_kl": "{name: off_rl, kl_coefficient: 0.04, kl_aggregation: token_mean}",
    "fpa_correct": "{name: fpa, fpa_on: correct}",
    "fpa_incorrect": "{name: fpa, fpa_on: incorrect}",
    "fpa_lambda_0.5": "{name: fpa, extrapolation: 0.5}",
    "fpa_lambda_2": "{name: fpa, extrapolation: 2.0}",
    "fpa_lambda_5": "{name: fpa, extrapolation: 5.0}",
    "fpa_lambda_10": "{name: fpa, extrapolation: 10.0}",
}
RATE = 3e-4
RATES = {  # found on one seed among 5e-5 and 3e-4: these methods fall apart at the larger one
    "dpo": 5e-5,
    "kto": 5e-5,
    "a_star_po": 5e-5,
    "simper": 5e-5,
    "ipo": 5e-5,
    "simpo": 5e-5,
    "off_rl_low_lr": 0.8 * RATE,  # table 2
}
LAMBDAS = ("off_rl", "fpa_lambda_0.5", "fpa", "fpa_lambda_2", "fpa_lambda_5", "fpa_lambda_10")
STARTS = {"strong": 5.0, "weak": 3.0}  # epochs of the warm start
LONG = {  # learning rate, steps, and the seeds that each method gets
    "weak": (1e-3, 300, {"off_rl": 3, "fpa": 3, "fpa_incorrect": 3, "fpa_correct": 1, "fpa_lambda_5": 1}),
    "strong": (1e-3, 600, {"off_rl": 1, "fpa": 1}),
}


def draw(folders: list[Path], picture: Path) -> None:
    script = HERE.parents[1] / "figures.py"
    subprocess.run([sys.executable, str(script), "dynamics", *map(str, folders), "--out", str(picture)], check=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/miniature"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS), help="of " + ", ".join(METHODS))
    parser.add_argument("--epochs", type=float, default=1.5)
    parser.add_argument("--no-long", action="store_true", help="leave out the long runs")
    parser.add_argument("--nproc", type=int, default=1)
    args, args.options = parser.parse_known_args()
    args.methods = args.methods.split(",")
    if unknown := set(args.methods) - METHODS.keys():
        parser.error(f"--methods: there is no {', '.join(sorted(unknown))}")
    return args


class Miniature:
    def __init__(self, args: argparse.Namespace):
        self.out, self.nproc, self.options = args.out, args.nproc, args.options

    def rft(self, command: str, recipe: Path, out: Path, *options: str, done: str = "export") -> Path:
        """`megatron-rft COMMAND`, unless its output is there. Returns the output folder."""
        if not (out / done).exists():
            print(f"--- {out}", flush=True)
            line = [sys.executable, "-m", "megatron_rft", command, str(recipe), f"run.output_dir={out}", *options]
            subprocess.run([*line, "--nproc", str(self.nproc)], check=True)
        return out

    def start(self, name: str) -> tuple[Path, Path]:
        """A warm-started model and its trajectories."""
        model = self.out / "model"
        if not model.exists():
            arithmetic.write_model_folder(model, **MODEL)
        options = (f"model.path={model}", f"run.epochs={STARTS[name]}", "optimizer.lr=5e-3", "data.test=null")
        sft = self.rft("train", HERE.parents[1] / "quickstart" / "sft.yaml", self.out / name / "sft", *options)
        store = self.out / name / "trajectories"
        self.rft("generate", HERE / "generate.yaml", store, f"model.path={sft / 'export'}", done="index.json")
        return sft / "export", store

    def train(self, name: str, start: str, algorithm: str, *options: str) -> Path:
        """An offline run from a start; the later of two equal options holds."""
        model, store = self.start(start)
        given = (f"model.path={model}", f"data.train={store}", f"algorithm={algorithm}", *options, *self.options)
        return self.rft("train", HERE / "common.yaml", self.out / start / name, *given)

    def method(self, name: str, seed: int, epochs: float) -> Path:
        """A row of the tables."""
        options = (f"run.seed={seed}", f"run.epochs={epochs}", f"optimizer.lr={RATES.get(name, RATE)}")
        return self.train(f"seed{seed}/{name}", "strong", METHODS[name], *options)

    def long(self, start: str) -> None:
        """The long runs from a start, their table and their picture."""
        rate, steps, seeds = LONG[start]
        options = (f"optimizer.lr={rate}", f"run.steps={steps}", "run.epochs=null", f"evaluation.every={steps // 12}")
        options += ("data.test=null", "data.prompt_template=null")
        runs: dict[str, list[Path]] = {}
        for seed in range(max(seeds.values())):
            for name in (name for name, count in seeds.items() if seed < count):
                how = METHODS[name]
                run = self.train(f"long/seed{seed}/{name}", start, how, f"run.seed={seed}", *options)
                runs.setdefault(name, []).append(run)
            write(self.out / f"long_{start}.md", long_table(runs))
        draw([of_seeds[0] for of_seeds in runs.values()], self.out / f"long_{start}.png")


def tested(run: Path, first: bool = False) -> float:
    """Test pass@1 of the model that the run exported, or of the one that it began with."""
    results = sorted(run.glob("evaluation/test_step_*/results.json"))
    return json.loads(results[0 if first else -1].read_text())[0]["pass_at_1"]


def validated(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["evaluation/pass@1"]) for line in lines if "evaluation/pass@1" in line]


def cell(values: list[float]) -> str:
    error = f" ± {100 * stdev(values) / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{error}"


def table(runs: dict[str, list[Path]]) -> str:
    lines = [
        "Pass@1 in %, mean over seeds ± its standard error: of the best checkpoint on the test problems, of the best "
        "and of the last evaluation on the held-out problems.",
        "",
        "| method | seeds | test | held-out, best | held-out, last |",
        "| --- | --- | --- | --- | --- |",
        f"| start | | {100 * tested(next(iter(runs.values()))[0], first=True):.1f} | | |",
    ]
    for name, of_seeds in runs.items():
        curves = [[accuracy for step, accuracy in validated(run) if step] for run in of_seeds]
        cells = [[tested(run) for run in of_seeds], [max(c) for c in curves], [c[-1] for c in curves]]
        lines.append(f"| {name} | {len(of_seeds)} | " + " | ".join(map(cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def long_table(runs: dict[str, list[Path]]) -> str:
    lines = [
        "Pass@1 in % on the held-out problems, mean over seeds ± its standard error.",
        "",
        "| method | seeds | start | lowest | best | last | steps |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, of_seeds in runs.items():
        curves = [[accuracy for _, accuracy in validated(run)] for run in of_seeds]
        numbers = (
            [c[0] for c in curves],
            *([pick(c[1:]) for c in curves] for pick in (min, max)),
            [c[-1] for c in curves],
        )
        cells = " | ".join(map(cell, numbers))
        lines.append(f"| {name} | {len(of_seeds)} | {cells} | {validated(of_seeds[0])[-1][0]} |")
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    path.write_text(text)
    print(text, flush=True)


def report(out: Path, runs: dict[str, list[Path]]) -> None:
    """The table and the pictures of what there is so far."""
    write(out / "table.md", table(runs))
    pictures = {"dynamics.png": [runs[name][:1] for name in ("off_rl", "fpa") if name in runs]}
    pictures["lambda.png"] = [runs[name] for name in LAMBDAS if name in runs]
    for picture, shown in pictures.items():
        if shown:
            draw(sum(shown, []), out / picture)


def main() -> None:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    miniature = Miniature(args)
    runs: dict[str, list[Path]] = {}
    for seed in range(args.seeds):
        for name in args.methods:
            runs.setdefault(name, []).append(miniature.method(name, seed, args.epochs))
        report(args.out, runs)
        if seed == 0 and not args.no_long:  # before the other seeds, which only make the table surer
            miniature.long("weak")
    if not args.no_long:
        miniature.long("strong")


if __name__ == "__main__":
    main()
