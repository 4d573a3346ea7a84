"""Kills runs with SIGKILL at random moments until they are done, and compares each with a run that nothing happened to.

    PYTHONPATH=. python tools/kill_test.py RECIPE [--kills 10] [--nproc N] [--seed S] [section.option=value ...]
    PYTHONPATH=. python tools/kill_test.py tiny [--only TEXT] [--kills 10] ...     every algorithm, in a tiny recipe

The exported weights must be equal to the last bit, and so must every number in metrics.jsonl that no clock makes. The
exit status is 1 where they are not. A kill comes at a random moment of a random step, or of the start where the log has
that step already. Where a run ends before its kill, its export and last checkpoint are removed for the next one.
"""

import argparse
import random
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import yaml

from tests.integration import test_constraint, test_offline, test_online_algorithms
from tests.integration.test_kill_and_resume import numbers
from tests.integration.tiny import ROOT, kill, metrics, start, train, wait_until, write_recipe
from tests.unit.test_docs import files_of

STEPS = 12
PIPO = test_online_algorithms.PIPO
OFFLINE = ("fpa", "off_rl", "dpo", "rpo", "ipo", "simpo", "simper", "kto", "a_star_po", "rft")
ONLINE = (
    {f"{name} with PIPO": sections for name, sections in test_online_algorithms.CLOSED.items()}
    | test_online_algorithms.OTHERS
    | {
        "grpo with PIPO, generating ahead": {
            "algorithm": {"name": "grpo"},
            "pipo": PIPO,
            "rollout": {"staleness": 1, "placement": "process"},
        },
        "dapo with PIPO and a dynamic constraint": test_constraint.SECTIONS,
        "own": {"algorithm": {"name": "own", "objective": "gentle.py:Gentle", "negative": 0.25}},
    }
)


def tiny_recipes(folder: Path, only: str) -> Iterator[tuple[str, Path]]:
    """(name, recipe) of every algorithm in the README's table, with the model and the data that it reads."""
    for name, sections in ONLINE.items():
        if only not in name:
            continue
        place = folder / name.replace(" ", "_")
        place.mkdir()
        files_of(ROOT / "docs/own_algorithm.md", place)
        (place / "refine.txt").write_text("{question}{response}\n")
        sections = {key: dict(value) for key, value in sections.items()} | {"run": {"steps": STEPS, "seed": 3}}
        if "constraint" in sections:
            sections["constraint"]["template"] = str(place / "refine.txt")
        if name == "own":
            sections["algorithm"]["objective"] = f"{place}/gentle.py:Gentle"
        yield name, test_online_algorithms.recipe_of(place, sections)
    if only in "sft":
        yield "sft", sft_recipe(folder / "sft")
    offline = [name for name in OFFLINE if only in name]
    if offline:
        (folder / "offline").mkdir()
        store = test_offline.make_store(folder / "offline")
    for name in offline:
        recipe = test_offline.OFFLINE | {"algorithm": {"name": name, "batch_sequences": 16}}
        test_offline.write(store, name, recipe, "store", name)
        yield name, store / f"{name}.yaml"


def sft_recipe(folder: Path) -> Path:
    folder.mkdir()
    path = write_recipe(folder, trainer="sft", run={"steps": STEPS})
    recipe = yaml.safe_load(path.read_text())
    recipe |= {"algorithm": {"name": "sft", "batch_sequences": 8}, "rollout": {"max_response_tokens": 8}}
    path.write_text(yaml.safe_dump(recipe))
    return path


def export(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "export").glob("*.safetensors"))}


def last_step(run: Path) -> int:
    log = run / "metrics.jsonl"
    return max(len(log.read_bytes().splitlines()) - 1, 0) if log.is_file() else 0


def reached(run: Path, step: int) -> bool:
    return last_step(run) >= step


def undo_the_end(out: Path) -> None:
    """Make a finished run one that was killed before its last checkpoint."""
    shutil.rmtree(out / "export", ignore_errors=True)
    checkpoints = sorted((out / "checkpoints").glob("step_??????"))
    if len(checkpoints) > 1:
        shutil.rmtree(checkpoints[-1])


class Case:
    """One recipe: the undisturbed run, the kills, and the comparison."""

    def __init__(self, recipe: Path, out: Path, options: argparse.Namespace):
        self.recipe, self.calm, self.killed, self.options = recipe, out / "undisturbed", out / "killed", options
        self.arguments = [*options.overrides, *(["--nproc", str(options.nproc)] if options.nproc > 1 else [])]
        self.forked = options.recipe == "tiny"
        self.moments = random.Random(f"{options.seed} {out.name}")

    def finish(self, out: Path) -> None:
        """Run to the end."""
        status, output = train(self.recipe, *self.arguments, f"run.output_dir={out}", forked=self.forked)
        if status:
            sys.exit(f"{self.recipe}: status {status}\n{output[-3000:]}")

    def disturb(self) -> list[str]:
        """Start the run and kill it, as often as was asked for. The last step in the log at each kill."""
        first, *_, last = metrics(self.calm)
        pause = (last["time"] - first["time"]) / last["step"]
        told = []
        for _ in range(self.options.kills):
            process = start(self.recipe, *self.arguments, f"run.output_dir={self.killed}", forked=self.forked)
            step = self.moments.randrange(last["step"])
            if wait_until(partial(reached, self.killed, step), process):
                time.sleep(self.moments.uniform(0, pause))
            kill(process)
            process.communicate()
            told.append(str(last_step(self.killed)))
            if (self.killed / "export").exists():
                undo_the_end(self.killed)
        return told

    def run(self) -> tuple[bool, str]:
        self.finish(self.calm)
        told = self.disturb()
        self.finish(self.killed)
        weights, log = export(self.calm) == export(self.killed), numbers(self.calm) == numbers(self.killed)
        verdict = f"weights {'equal' if weights else 'DIFFER'}, log {'equal' if log else 'DIFFERS'}"
        return weights and log, f"{verdict}; last step at each kill: {' '.join(told)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", help="a file, or `tiny` for a tiny recipe of every algorithm")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--only", default="", help="of the tiny recipes: those whose name has this text")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/kill_test"))
    options = parser.parse_intermixed_args()
    shutil.rmtree(options.out, ignore_errors=True)
    options.out.mkdir(parents=True)
    recipes = tiny_recipes(options.out.resolve(), options.only) if options.recipe == "tiny" else None
    failed = 0
    for name, recipe in recipes or [(Path(options.recipe).stem, Path(options.recipe))]:
        equal, told = Case(recipe, options.out.resolve() / f"{name.replace(' ', '_')}.runs", options).run()
        failed += not equal
        print(f"{name:40} {options.kills} kills: {told}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
