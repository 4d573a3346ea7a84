"""Compares this checkout with another commit: both run in turns on this machine.

    python tools/bench/compare.py COMMIT [--only grpo fpa] [--pairs 3] [--steps 6]

Each process has one thread. COMMIT is checked out into a temporary folder. A pair is one run of each side, and the side
that goes first changes from pair to pair. Cells are the other commit's figure over this checkout's, above 1 where this
one is better: the median of the pairs, with the lowest and the highest.

    step        median of the seconds of a run's steps after the first two, without checkpoints
    start       seconds from the command to the end of its first step, less that step's
    processor   processor seconds of the whole command and of all that it started
    clock       its seconds by the clock
    memory      the largest resident set of one of its processes; of training, the peak that the run measures at its
                steps, which resets the system's

A dash: the command logs no steps. "not there": the other commit cannot run the command, which then prints why.
"""

import argparse
import compileall
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pipo_overlap import ENVIRONMENT, SETTING, WINDOW, seconds

SMALLEST = """HEAD --only grpo grading --pairs 1 --steps 3 --answers 20
    rollout.prompts_per_step=2 rollout.group_size=4 rollout.max_response_tokens=4"""  # tests/bench
HERE = Path(__file__).resolve().parents[2]
PREPARED = ("model", "smol", "answers", "grading", "quickstart")  # files and folders that both sides read
COLUMNS = ("step", "start", "processor", "clock", "memory")
LONG = "data.prompt_template=" + "Add up the numbers with care. " * 6 + "{question}\n"
SMOL = "data.validation=null data.test=null evaluation.every=0 rollout.prompts_per_step=4 rollout.group_size=8"


@dataclass(frozen=True)
class Work:
    """`words` are for Python, in the side's checkout. {steps}, {out} and the names of PREPARED are
    filled in."""

    words: str
    once: bool = False  # one pair: it takes minutes
    overrides: tuple[str, ...] = ()


def _train(recipe: str, options: str) -> str:
    return (
        f"-m megatron_rft train examples/{recipe}.yaml run.output_dir={{out}} run.steps={{steps}} --nproc 1 {options}"
    )


GRPO = _train("quickstart/pipo", " ".join(["model.path={model}", *SETTING]))
SMOLLM2 = _train("smollm2/grpo_pipo", f"model.path={{smol}}/model data.train={{smol}}/problems/train.jsonl {SMOL}")
WORKS = {
    "grpo": Work(GRPO + " pipo=null"),
    "pipo": Work(f"{GRPO} pipo.window={WINDOW} pipo.learning_rate=1e-12"),
    "shared_prompts": Work(GRPO + " pipo=null data.max_prompt_tokens=448", overrides=(LONG,)),
    "fpa": Work("tools/bench/fpa_step.py --size 1m --vocab 32000 --sequences 8 --rounds 4"),
    "grading": Work("{grading} {answers}"),
    "smollm2_hf": Work(SMOLLM2 + " pipo=null rollout.engine=hf vllm=null", once=True),
    "smollm2_vllm": Work(SMOLLM2 + " pipo=null rollout.engine=vllm", once=True),
    "quickstart": Work("{quickstart} {model} {out}", once=True),
}
GRADING = """import sys
from megatron_rft.records import Prompt
from megatron_rft.rewards.math import MathReward
pairs = [line.rstrip("\\n").split("\\t") for line in open(sys.argv[1])]
prompts = [Prompt(number, (1,), "", reference) for number, (reference, _) in enumerate(pairs)]
MathReward()(prompts, [text for _, text in pairs])
"""
QUICKSTART = """import subprocess, sys
model, out = sys.argv[1:]
common = [sys.executable, "-m", "megatron_rft", "train"]
sft = ["examples/quickstart/sft.yaml", f"model.path={model}", f"run.output_dir={out}/sft"]
pipo = ["examples/quickstart/pipo.yaml", f"model.path={out}/sft/export", f"run.output_dir={out}/pipo", "run.steps=10"]
for each in (sft, pipo):
    subprocess.run([*common, *each, "rollout.engine=hf", "--nproc", "2"], check=True)
"""


def write_answers(path: Path, count: int) -> None:
    """Lines of a reference and a response: fractions, powers, intervals and words, half of them right."""
    rng, lines = random.Random(0), []
    for _ in range(count):
        a, b = rng.randrange(1, 99), rng.randrange(2, 99)
        forms = [(f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}"), (f"{a}", f"{a}.0"), (f"({a},{a + b}]", f"({a}, {a + b}]")]
        forms += [(f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{b}}} \\cdot {a}"), (f"x^{{{a}}}+{b}", f"{b} + x^{a}")]
        reference, answer = rng.choice(forms)
        wrong = rng.random() < 0.5
        lines.append(f"{reference}\tSo it is $\\boxed{{{answer}{'1' if wrong else ''}}}$.\n")
    path.write_text("".join(lines))


def measured(work: Work, side: Path, names: dict[str, str], overrides: list[str]) -> dict[str, float] | str:
    """The figures of one command in a checkout, or the end of what it printed if it failed."""
    out = Path(names["out"])
    words = [word.format(**names) for word in work.words.split()]
    if "train" in words:
        words += [*work.overrides, *overrides]
    environment = os.environ | ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{side}:{side}/tools/bench"}
    with open(out.with_suffix(".log"), "w+") as log:
        begin, start = time.time(), time.perf_counter()
        process = subprocess.Popen([sys.executable, *words], cwd=side, env=environment, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        clock = time.perf_counter() - start
        if process.returncode:
            log.seek(0)
            return log.read()[-600:]
    found = {"processor": usage.ru_utime + usage.ru_stime, "clock": clock, "memory": float(usage.ru_maxrss)}
    return found | (of_steps(out / "metrics.jsonl", begin) if "train" in words else {})


def of_steps(path: Path, begin: float) -> dict[str, float]:
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if line["step"]]
    start = lines[0]["time"] - begin - seconds(lines[:1])["step"]
    peak = max(line["memory/peak_gib"] for line in lines)
    return {"step": seconds(lines[2:])["step"], "start": start, "memory": peak}


def cell(pairs: list[tuple[dict[str, float], dict[str, float]]], name: str) -> str:
    ratios = [other.get(name, math.nan) / this.get(name, math.nan) for other, this in pairs]
    if any(map(math.isnan, ratios)):
        return "–"
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def row(name: str, sides: list[Path], folder: Path, arguments: argparse.Namespace) -> str:
    """One line of the table. The first side is the other commit."""
    work, pairs = WORKS[name], []
    for number in range(1 if work.once else arguments.pairs):
        figures: dict[int, dict[str, float]] = {}
        for place in (0, 1) if number % 2 == 0 else (1, 0):
            names = {each: str(folder / each) for each in PREPARED}
            names |= {"steps": str(arguments.steps), "out": str(folder / f"{name}_{number}_{place}")}
            found = measured(work, sides[place], names, arguments.overrides)
            if isinstance(found, str) and place:
                sys.exit(f"{name} fails in this checkout:\n{found}")
            if isinstance(found, str):
                print(found, file=sys.stderr)
                return f"| {name} | " + " | ".join(["not there"] * len(COLUMNS)) + " |"
            figures[place] = found
        pairs.append((figures[0], figures[1]))
    return f"| {name} | " + " | ".join(cell(pairs, column) for column in COLUMNS) + " |"


def prepare(folder: Path, arguments: argparse.Namespace) -> None:
    """Write what both sides read."""
    made = [["examples/quickstart/make_model.py", folder / "model"]]
    if any("smollm2" in name for name in arguments.only):
        made += [["examples/smollm2/make_model.py", folder / "smol/model"]]
        made += [["examples/smollm2/make_problems.py", folder / "smol/problems"]]
    for words in made:
        subprocess.run([sys.executable, *map(str, words)], cwd=HERE, check=True, stdout=sys.stderr)
    (folder / "grading").write_text(GRADING)
    (folder / "quickstart").write_text(QUICKSTART)
    write_answers(folder / "answers", arguments.answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--only", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of a run; the first two are not counted")
    parser.add_argument("--answers", type=int, default=10_000, help="responses to grade")
    parser.add_argument("overrides", nargs="*", help="section.option=value, for the runs of both sides")
    arguments = parser.parse_intermixed_args()
    git = ["git", "-C", str(HERE)]
    commit = subprocess.run([*git, "rev-parse", arguments.commit], check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other = folder / "other"
        subprocess.run([*git, "worktree", "add", "--quiet", "--detach", str(other), commit.strip()], check=True)
        try:
            for side in (other, HERE):  # else the first run of a side compiles its modules
                compileall.compile_dir(side / "megatron_rft", quiet=2)
            prepare(folder, arguments)
            print(f"| {arguments.commit} / this | " + " | ".join(COLUMNS) + " |\n" + "|---" * (len(COLUMNS) + 1) + "|")
            for work in arguments.only:
                print(row(work, [other, HERE], folder, arguments), flush=True)
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(other)], check=True)


if __name__ == "__main__":
    main()
