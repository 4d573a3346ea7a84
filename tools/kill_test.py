"""Kills and stops runs at random moments, and compares each one that ends with a run that nothing happened to.

    PYTHONPATH=. python tools/kill_test.py RECIPE [--kills 10] [--nproc N] [--seed S] [section.option=value ...]
    PYTHONPATH=. python tools/kill_test.py tiny [--only NAME,TEXT] [--kills 10] ...     every algorithm in a tiny recipe
    PYTHONPATH=. python tools/kill_test.py tiny --signals TERM,USR1,INT                 no SIGKILL

A stop signal goes to the group of the run, as `timeout` and a terminal send it, or to all of its processes, as Slurm
does, once or twice. The run must then save its last step and end with status 75, or with 0 where no step was left. A
run is started again after each signal until it ends. Then its exported weights must be equal to the last bit, and so
must every number in metrics.jsonl that no clock makes; the next signals are for a new run. The exit status is 1 where
anything differs or fails. The tool prints the phases in which signals came (`other`:
between phases), what was sent, and the exit statuses.
Do not change the package meanwhile: ranks have it as it was at the start, engine processes read it anew.
"""

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import cache, partial
from pathlib import Path

import yaml

from megatron_rft.launching.hangs import descendants, position_file
from megatron_rft.launching.ranks import ranks_folder
from megatron_rft.tracking.metrics import read_metrics
from megatron_rft.utils.checkpoint_files import latest
from megatron_rft.utils.position import Position, read
from tests.fork_server import server
from tests.integration import test_agents, test_constraint, test_distil, test_offline, test_online_algorithms
from tests.integration.test_kill_and_resume import numbers
from tests.integration.tiny import ROOT, start, wait_until, write_recipe
from tests.unit.test_docs import files_of

STEPS = 12
PIPO = test_online_algorithms.PIPO
OFFLINE = ("fpa", "a_star_po", "kto", "dpo", "rft", "off_rl", "rpo", "ipo", "simpo", "simper", "offline_distil")
AHEAD = {
    "algorithm": {"name": "grpo", "importance": "truncated"},
    "pipo": PIPO,
    "rollout": {"staleness": 1, "placement": "process"},
}
ONLINE = (
    {"dapo with PIPO and a dynamic constraint": test_constraint.SECTIONS}
    | {"grpo with PIPO, generating ahead": AHEAD}
    | {f"{name} with PIPO": sections for name, sections in test_online_algorithms.CLOSED.items()}
    | test_online_algorithms.OTHERS
    | {"own": {"algorithm": {"name": "own", "objective": "gentle.py:Gentle", "negative": 0.25}}}
)
NAMES = (*ONLINE, "environment with PIPO", "distil", "sft", *OFFLINE)


def tiny_recipe(name: str, folder: Path) -> Path:
    """The recipe of an algorithm in the README's table, with the model and the data that it reads."""
    if name in OFFLINE:
        store = store_in(folder / "offline")
        teacher = {"teacher": str(store / "teacher")} if name == "offline_distil" else {}
        recipe = test_offline.OFFLINE | {"algorithm": {"name": name, "batch_sequences": 16} | teacher}
        test_offline.write(store, name, recipe, "store", name)
        return store / f"{name}.yaml"
    place = folder / name.replace(" ", "_")
    place.mkdir()
    if name == "environment with PIPO":
        return test_agents.write(place, **test_agents.PARTS["pipo"], run={"steps": STEPS})
    if name == "distil":
        return test_distil.write(place, run={"steps": STEPS, "seed": 3})
    return sft_recipe(place) if name == "sft" else online_recipe(name, place)


@cache
def store_in(folder: Path) -> Path:
    folder.mkdir()
    test_distil.write_teacher(folder / "teacher", test_offline.make_store(folder) / "model")
    return folder


def online_recipe(name: str, folder: Path) -> Path:
    files_of(ROOT / "docs/own_algorithm.md", folder)
    (folder / "refine.txt").write_text("{question}{response}\n")
    sections = {key: dict(value) for key, value in ONLINE[name].items()} | {"run": {"steps": STEPS, "seed": 3}}
    if "constraint" in sections:
        sections["constraint"]["template"] = str(folder / "refine.txt")
    if name == "own":
        sections["algorithm"]["objective"] = f"{folder}/gentle.py:Gentle"
    return test_online_algorithms.recipe_of(folder, sections)


def sft_recipe(folder: Path) -> Path:
    path = write_recipe(folder, trainer="sft", run={"steps": STEPS})
    recipe = yaml.safe_load(path.read_text())
    recipe |= {"algorithm": {"name": "sft", "batch_sequences": 8}, "rollout": {"max_response_tokens": 8}}
    path.write_text(yaml.safe_dump(recipe))
    return path


def export(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "export").glob("*.safetensors"))}


def position_of(run: Path) -> Position:
    """Of rank 0, also after its end."""
    return read(position_file(ranks_folder(str(run)), 0), 0) or Position(0)


def reached(run: Path, moves: float) -> bool:
    return position_of(run).moves >= moves


class Case:
    """One recipe: the undisturbed run, the kills, and the comparisons."""

    def __init__(self, recipe: Path, out: Path, options: argparse.Namespace):
        self.recipe, self.calm, self.run, self.options = recipe, out / "undisturbed", out / "killed", options
        self.arguments = [*options.overrides, *(["--nproc", str(options.nproc)] if options.nproc > 1 else [])]
        self.moments = random.Random(f"{options.seed} {out.name}")
        self.killed_in: Counter[str] = Counter()  # phases
        self.sent: Counter[str] = Counter()
        self.ended: Counter[int] = Counter()  # exit statuses of the disturbed runs
        self.compared = 0
        out.mkdir()

    def start(self, run: Path) -> subprocess.Popen:
        position_file(ranks_folder(str(run)), 0).unlink(missing_ok=True)
        with run.with_suffix(".log").open("w") as log:
            options, forked = [*self.arguments, f"run.output_dir={run}"], self.options.recipe == "tiny"
            return start(self.recipe, *options, forked=forked, stdout=log)

    def finish(self, run: Path) -> None:
        if status := self.start(run).wait():
            raise RuntimeError(self.failure(run, status))

    def disturb(self, seconds: float) -> None:
        """Start the run and kill it, as often as was asked for. `seconds`: of the undisturbed run."""
        moves = position_of(self.calm).moves
        while self.killed_in.total() < self.options.kills:
            process, target = self.start(self.run), moves * self.moments.uniform(-0.1, 0.4)
            wait_until(partial(reached, self.run, target), process)  # whatever the load of the machine
            time.sleep(self.moments.uniform(0, seconds / STEPS))
            if process.poll() is None:
                here = position_of(self.run)
                self.killed_in[here.phase or "start"] += 1
                number = signal.Signals[f"SIG{self.moments.choice(self.options.signals.split(','))}"]
                self.send(process, number)
                self.check_end(process.wait(), number, here)
            elif process.returncode:
                raise RuntimeError(self.failure(self.run, process.returncode))
            if process.wait() == 0:
                self.compare()

    def send(self, process: subprocess.Popen, number: signal.Signals) -> None:
        everywhere, twice = self.moments.random() < 0.5, self.moments.random() < 0.5
        to = "to all, " * everywhere + "to the group, " * (1 + twice - everywhere)
        self.sent[f"{number.name} {to[:-2]}"] += 1
        if everywhere or number == signal.SIGKILL:
            for pid in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        for _ in range(1 + twice - everywhere):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def check_end(self, status: int, number: signal.Signals, here: Position) -> None:
        """Raises RuntimeError if a run that was asked to stop did not save. `here`: its position at the signal."""
        self.ended[status] += 1
        if number == signal.SIGKILL:
            return
        early = {-number, 128 + number} if here.phase in ("", "start") else set()  # there is nothing to save
        if status not in {75, 0} | early:
            raise RuntimeError(f"{number.name}: {self.failure(self.run, status)}")
        if status != 0 and "stopped by" not in self.run.with_suffix(".log").read_text():
            return  # before the first step
        last = read_metrics(self.run / "metrics.jsonl")[-1]["step"]
        if status == 0 and 0 < here.step < last - 1:
            raise RuntimeError(f"{number.name} in step {here.step} did not stop it")
        if status == 75:
            newest = latest(self.run / "checkpoints")
            if newest is None or newest.name != f"step_{last:06d}" or any(newest.parent.glob("*.partial")):
                raise RuntimeError(f"{number.name} after step {last}: {newest} is the newest checkpoint")

    def failure(self, run: Path, status: int) -> str:
        return f"status {status}\n{run.with_suffix('.log').read_text()[-3000:]}"

    def compare(self) -> None:
        """And remove the run, so that the next one begins anew."""
        if export(self.calm) != export(self.run):
            raise RuntimeError(f"the weights differ: {self.run}")
        if numbers(self.calm) != numbers(self.run):
            raise RuntimeError(f"the logs differ: {self.run}")
        self.compared += 1
        shutil.rmtree(self.run)

    def check(self) -> str:
        """What is wrong; empty if nothing is."""
        try:
            began = time.monotonic()
            self.finish(self.calm)
            self.disturb(time.monotonic() - began)
            self.finish(self.run)
            self.compare()
        except RuntimeError as error:
            return str(error)
        return ""


def chosen(text: str) -> list[str]:
    """The tiny recipe of that name, or else all whose names have the text."""
    return [text] if text in NAMES else [name for name in NAMES if text in name]


def counts(of: Counter) -> str:
    return "    " + "; ".join(f"{name}: {count}" for name, count in of.most_common())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("recipe", help="a file, or `tiny` for a tiny recipe of every algorithm")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--only", default="", help="of the tiny recipes: names, or texts in names")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--signals", default="KILL,TERM,USR1,INT")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/kill_test"))
    options = parser.parse_intermixed_args()
    texts = options.only.split(",")
    if missing := [text for text in texts if not chosen(text)]:
        parser.error(f"--only: {missing[0]} is in no name of a tiny recipe: {', '.join(NAMES)}")
    wanted = [name for text in texts for name in chosen(text)]
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    tiny, failed = options.recipe == "tiny", 0
    if tiny:
        server()  # its start is not part of a run's time
    for name in dict.fromkeys(wanted) if tiny else [options.recipe]:
        recipe = tiny_recipe(name, out) if tiny else Path(name)
        case = Case(recipe, out / f"{recipe.stem if not tiny else name.replace(' ', '_')}.runs", options)
        wrong = case.check()
        failed += bool(wrong)
        print(f"{name}: {case.killed_in.total()} signals, {case.compared} runs equal. {wrong}")
        print(*map(counts, (case.killed_in, case.sent, case.ended)), sep="\n", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
