"""The runs of a table or figure of the three papers: prints or submits their commands, and collects the table.

    python examples/papers.py                                        # lists all tables and figures
    python examples/papers.py pipo table1 --model 4b --nodes 1       # prints the commands of all runs
    python examples/papers.py pipo table1 --model 4b --submit --account me --partition gpu --gpus-per-node 8 \\
        --workspace /lustre/me/rft                                   # the same by NeMo-Run: what launch/nemo.py takes
    python examples/papers.py pipo table1 --model 4b --collect runs  # the table of the runs in there, missing ones too

The grids are in examples/grids. Tables share runs: a run's folder is named after its recipe, options and seed. Commands
resume unfinished runs and evaluations; finished ones take seconds. Overrides of an evaluation's sampling, such as
evaluation.samples=1, are for the evaluations alone, whose results then have a folder of their own.
"""

import argparse
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from examples.grids import collect, grid  # noqa: E402

STAGES = ("generate", "train", "evaluate")
SAMPLING = tuple(f"evaluation.{name}=" for name in ("samples", "temperature", "max_response_tokens", "limit"))


@dataclass(frozen=True)
class Job:
    """One command of megatron-rft."""

    name: str
    command: str
    recipe: Path
    keys: list[str] = field(default_factory=list)

    def line(self, nodes: int, nproc: int) -> str:
        words = ["megatron-rft", self.command, _shown(self.recipe), *self.keys]
        if self.command == "evaluate":
            return shlex.join(words)
        spread = [f"srun --nodes={nodes} --ntasks-per-node=1"] if nodes > 1 else []
        return " ".join([*spread, shlex.join([*words, "--nproc", str(nproc)])])


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    top.add_argument("paper", nargs="?", help=" or ".join(grid.papers()))
    top.add_argument("table", nargs="?", help="such as table1 or figure2")
    top.add_argument("keys", nargs="*", default=[], metavar="section.option=value", help="on top, for every run")
    top.add_argument("--model", metavar="SIZE", help="such as 4b (default: each that the table has)")
    top.add_argument("--nodes", type=int, default=1, metavar="N", help="of a training job (default: 1)")
    top.add_argument("--nproc", type=int, default=8, metavar="N", help="ranks per node, for printing (default: 8)")
    top.add_argument("--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="of all runs (default: runs)")
    top.add_argument("--files", type=Path, metavar="FOLDER", help="with the benchmarks that are on no hub")
    top.add_argument("--seeds", type=int, nargs="+", default=[], metavar="N", help="in place of the grid's")
    top.add_argument("--stage", choices=STAGES, help="only this one (default: all, one after the other)")
    top.add_argument("--collect", type=Path, metavar="FOLDER", help="make the table of the runs in there")
    top.add_argument("--out", type=Path, metavar="FILE", help="of a collected figure (default: TABLE.png)")
    top.add_argument("--submit", metavar="...", help="run them by NeMo-Run: all that follows goes to launch/nemo.py")
    return top


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the arguments; overrides may stand between options. `submit`: the arguments after --submit, or None."""
    given, found, rest = _split(arguments, "--submit")
    args = parser().parse_intermixed_args(given)
    args.submit = rest if found else None
    return args


def _split(words: list[str], at: str) -> tuple[list[str], bool, list[str]]:
    place = words.index(at) if at in words else len(words)
    return words[:place], at in words, words[place + 1 :]


def jobs(table: grid.Table, stage: str, keys: list[str]) -> list[Job]:
    """The commands of one stage, without duplicates."""
    found: dict[tuple, Job] = {}
    for run in table.all_runs():
        for job in {"generate": _generate, "train": _train, "evaluate": _evaluate}[stage](table, run, keys):
            found.setdefault((job.command, *job.keys), job)
    return list(found.values())


def _generate(table: grid.Table, run: grid.Run, keys: list[str]) -> list[Job]:
    if run.store is None or not run.trained:
        return []
    return [Job(_name(run.trajectories), "generate", run.store, [f"run.output_dir={run.trajectories}"])]


def _train(table: grid.Table, run: grid.Run, keys: list[str]) -> list[Job]:
    keys = [key for key in keys if not key.startswith(SAMPLING)]
    return [Job(_name(run.folder), "train", run.recipe, _keys(run, keys))] if run.trained else []


def _evaluate(table: grid.Table, run: grid.Run, keys: list[str]) -> list[Job]:
    """Evaluations of the final model on the table's benchmarks; for a figure, of each checkpoint on the recipe's."""
    asked = _keys(run, keys) + _benchmarks(table)
    if steps := table.content.get("checkpoints"):
        checkpoints = {f"step_{step:06d}": ["--model", f"{run.folder}/checkpoints/step_{step:06d}"] for step in steps}
        asked = [*asked, "data.test=null"]  # math500 is among the benchmarks
        return [
            Job(f"{_name(run.folder)}-{at}", "evaluate", run.recipe, asked + model) for at, model in checkpoints.items()
        ]
    if not table.parts:
        return []
    given = [] if run.trained else ["--model", run.model]
    if given or table.evaluation != "export":
        given += ["--out", f"{run.folder}/evaluation/{table.evaluation}"]
    return [Job(_name(run.folder), "evaluate", run.recipe, asked + given)]


def _keys(run: grid.Run, keys: list[str]) -> list[str]:
    store = [f"data.train={run.trajectories}"] if run.trajectories and run.trained else []
    return [*run.options, f"run.output_dir={run.folder}", *store, *keys]


def _benchmarks(table: grid.Table) -> list[str]:
    """Overrides for benchmarks that the recipe lacks; without data.test if no column needs it."""
    added = []
    for name, about in table.paper.get("files", {}).items():
        if table.files and name in table.parts:
            more = "".join(f", {key}: {value}" for key, value in about.items() if key != "path")
            added.append(f"evaluation.benchmarks.{name}={{path: {table.files / about['path']}{more}}}")
    return added + (["data.test=null"] if table.parts and "test" not in table.parts else [])


def evaluation_name(keys: list[str]) -> str:
    """The folder of evaluations with other sampling is named after it."""
    return "-".join(["export", *(grid.label(key) for key in sorted(keys) if key.startswith(SAMPLING))])


def _name(folder: Path) -> str:
    return "-".join(folder.parts[-4:]).replace("/", "-")


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if Path.cwd() == ROOT else str(path)


def show(tables: list[grid.Table], args: argparse.Namespace) -> int:
    for table in tables:
        print(f"# {table.content['title']}, {table.model}: {len(table.all_runs())} runs")
        for stage in [args.stage] if args.stage else STAGES:
            for job in jobs(table, stage, args.keys):
                print(job.line(args.nodes, args.nproc))
        for line in after(table, args):
            print(line)
    return 0


def after(table: grid.Table, args: argparse.Namespace) -> list[str]:
    """The command that makes the table or the figure from the runs."""
    seeds = ["--seeds", *map(str, args.seeds)] if args.seeds else []
    sampling = [key for key in args.keys if key.startswith(SAMPLING)]
    words = [args.paper, args.table, *sampling, "--model", table.model, *seeds, "--collect", str(args.runs)]
    return [shlex.join(["python", "examples/papers.py", *words])]


def submit(tables: list[grid.Table], args: argparse.Namespace) -> int:
    """Submit one NeMo-Run experiment per stage; each starts after the one before has succeeded."""
    sys.path.insert(0, str(ROOT / "launch"))
    import nemo

    stages = {stage: [job for table in tables for job in jobs(table, stage, args.keys)] for stage in STAGES}
    wanted = {stage: found for stage, found in stages.items() if found and args.stage in (None, stage)}
    if "--detach" in args.submit and len(wanted) > 1:
        raise grid.GridError(f"--detach: stages wait for each other, so give one of them: --stage {next(iter(wanted))}")
    for stage, found in wanted.items():
        nodes = 1 if stage == "evaluate" else args.nodes
        points = [nemo.Point(job.name, job.keys, str(job.recipe), stage) for job in found]
        name = f"{args.paper}-{args.table}-{stage}"
        if status := nemo.main([str(found[0].recipe), "--nodes", str(nodes), "--name", name, *args.submit], points):
            return status
    return 0


def gather(tables: list[grid.Table], args: argparse.Namespace) -> int:
    for table in tables:
        if table.columns:
            print(collect.table(table))
        if kind := table.content.get("figure"):
            from examples import figures

            print(figures.of_table(kind, table, args.out or Path(f"{args.table}.png")))
    return 0


def overview() -> int:
    for paper in grid.papers():
        content = grid.read(paper)
        for name, table in content["tables"].items():
            print(f"{paper} {name}: {table['title']} [{', '.join(table.get('models', []))}]")
    return 0


def main(arguments: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        if args.paper is None:
            return overview()
        if args.table is None:
            raise grid.GridError(
                f"give a table or figure of {args.paper}: {', '.join(grid.read(args.paper)['tables'])}"
            )
        if wrong := [key for key in args.keys if "=" not in key]:
            raise grid.GridError(f"{wrong[0]!r} is not an override: write section.option=value")
        where = {
            "runs": args.collect or args.runs,
            "files": args.files or (args.collect and Path("FILES")),
            "chosen_seeds": tuple(args.seeds),
            "evaluation": evaluation_name(args.keys),
        }
        tables = grid.tables(args.paper, args.table, args.model, **where)
        if args.collect:
            return gather(tables, args)
        return show(tables, args) if args.submit is None else submit(tables, args)
    except ModuleNotFoundError as error:
        print(f"error: this needs {error.name}: use the Python of an environment that trains", file=sys.stderr)
        return 2
    except ValueError as error:  # GridError, and what a drawing says of a folder without a run
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
