"""The command line: `megatron-rft train|generate|plan ...`. Parses and validates before torch is imported.

Exit statuses: 0 finished, 2 a mistake of the user's, 3 the run failed, 75 stopped by a signal after a checkpoint (the
same command goes on), 130 Ctrl-C before there was anything to save.
"""

import argparse
import errno
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

from megatron_rft import __version__, doctor, launcher, slurm
from megatron_rft.config import Recipe, check, check_writable, load, make_folder
from megatron_rft.errors import RunFailed, UserError
from megatron_rft.job import Job
from megatron_rft.launcher import FAILED, FINISHED, STOPPED, USER_ERROR

PICTURES = (".png", ".pdf", ".svg")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="megatron-rft", description="Reinforcement fine-tuning on megatron-core.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a recipe, or go on with it", allow_abbrev=False)
    _add_recipe(train)
    _add_launch(train, "ranks")
    train.set_defaults(function=_train)

    generate = commands.add_parser("generate", help="sample and grade trajectories into a store", allow_abbrev=False)
    _add_recipe(generate)
    _add_launch(generate, "workers")
    generate.set_defaults(function=_generate)

    serve = commands.add_parser(
        "serve", help="vLLM servers on this node, for a run of the recipe on others", allow_abbrev=False
    )
    _add_recipe(serve)
    serve.add_argument(
        "--out", type=Path, default=Path("servers"), metavar="FOLDER", help="for logs, and URLs (default: servers)"
    )
    serve.set_defaults(function=_serve)

    plan = commands.add_parser(
        "plan", help="check a recipe and print its arithmetic: train --dry-run", allow_abbrev=False
    )
    _add_recipe(plan)
    plan.add_argument("--nproc", "--gpus", type=_count, metavar="N", help="ranks it would run on (default: 1)")
    plan.add_argument(
        "--gpu-gib", type=_size, metavar="GIB", help="memory of one GPU: does it fit, and what would help"
    )
    plan.set_defaults(function=_train, dry_run=True, job=None)

    evaluate = commands.add_parser("evaluate", help="measure a model on a recipe's problems", allow_abbrev=False)
    _add_recipe(evaluate)
    evaluate.add_argument(
        "--model",
        help="Hugging Face folder or hub name, Megatron checkpoint, or RUN: its newest (default: the run's export)",
    )
    evaluate.add_argument("--like", metavar="MODEL", help="where config.json and tokenizer are, if not with the model")
    evaluate.add_argument("--out", type=Path, metavar="FOLDER", help="for results (default: RUN/evaluation/MODEL)")
    evaluate.set_defaults(function=_evaluate)

    convert = commands.add_parser("convert", help="a checkpoint from one format into the other", allow_abbrev=False)
    convert.add_argument("source", help="Hugging Face folder or hub name, torch_dist checkpoint, or RUN (its newest)")
    convert.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    convert.add_argument("--to", choices=("hf", "megatron"), help="default: the other format than the source's")
    convert.add_argument("--like", metavar="MODEL", help="where config.json and tokenizer are, if not with the source")
    convert.add_argument("--tensor-parallel", type=_count, metavar="N", help="to megatron: chunks for N ranks (1)")
    convert.add_argument("--file-gib", type=_size, default=4.0, metavar="GIB", help="size of a file (default: 4)")
    convert.add_argument("--logits", action="store_true", help="also compare logits, in fp32: needs the model's memory")
    convert.set_defaults(function=_convert)

    harness = commands.add_parser("harness", help="a model on tasks of lm-evaluation-harness", allow_abbrev=False)
    harness.add_argument("model", metavar="MODEL", help="as for evaluate --model")
    harness.add_argument("--tasks", required=True, metavar="A,B", help="the harness's names of them")
    harness.add_argument("--include", metavar="FOLDER", help="a folder with more tasks")
    harness.add_argument("--limit", type=_count, metavar="N", help="the first so many problems of each")
    harness.add_argument("--like", metavar="MODEL", help="where config.json and tokenizer are, if not with the model")
    harness.add_argument("--out", type=Path, default=Path("harness"), metavar="FOLDER", help="default: harness")
    harness.set_defaults(function=_harness)

    report = commands.add_parser("report", help="a page about runs, with charts and samples", allow_abbrev=False)
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output folders; seeds are joined")
    report.add_argument("--out", type=Path, metavar="FOLDER", help="default: RUN/report, or report for several runs")
    report.set_defaults(function=_report)

    dynamics = commands.add_parser("dynamics", help="draw the dynamics of offline runs side by side")
    dynamics.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output folders of offline runs")
    dynamics.add_argument("--out", type=Path, default=Path("dynamics.png"), metavar="FILE", help="a .png, .pdf or .svg")
    dynamics.set_defaults(function=_dynamics)

    constraints = commands.add_parser("constraints", help="draw runs under different constraints side by side")
    constraints.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output folders; seeds are joined")
    constraints.add_argument(
        "--out", type=Path, default=Path("constraints.png"), metavar="FILE", help="a .png, .pdf or .svg"
    )
    constraints.set_defaults(function=_constraints)

    heatmap = commands.add_parser("heatmap", help="a page of what a run's refiner changed, token by token")
    heatmap.add_argument("run", type=Path, metavar="RUN", help="output folder of a run with a dynamic constraint")
    heatmap.set_defaults(function=_heatmap)

    doctor = commands.add_parser("doctor", help="what is installed here, and what a run would use")
    doctor.set_defaults(function=_doctor)
    return top


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", help="a YAML file")
    command.add_argument("overrides", nargs="*", default=[], metavar="section.option=value", help="on top of the file")
    command.add_argument("--engine", choices=("auto", "vllm", "hf"), help="the same as rollout.engine=...")


def _add_launch(command: argparse.ArgumentParser, processes: str) -> None:
    command.add_argument("--nproc", type=_count, metavar="N", help=f"{processes} on this node (default: 1)")
    command.add_argument("--dry-run", action="store_true", help="check the recipe, print its arithmetic and stop")
    command.add_argument("--job", type=Path, metavar="FOLDER", help="of a job that a queue starts again: its notes")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Overrides may stand before and after options, which argparse alone does not allow."""
    args, rest = parser().parse_known_args(arguments)
    if any(text.startswith("-") for text in rest) or rest and not hasattr(args, "overrides"):
        parser().error(f"there is no option {' '.join(rest)}")
    if rest:
        args.overrides += rest
    return args


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _size(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB")
    return size


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status; mistakes of the user's are one line on stderr, without a traceback."""
    args = parse(arguments)
    # megatron-core says it six times on import; `doctor` says what is installed
    warnings.filterwarnings("ignore", message=".*Apex (is|are) not installed")
    try:
        return args.function(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        if job := getattr(args, "job", None):  # the other nodes hear of it, or say the same
            place = slurm.place()
            Job(job, Path(), place.node, place.nodes).conclude(USER_ERROR)
        return USER_ERROR
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except ModuleNotFoundError as error:
        if not (package := doctor.package_of(error.name)):
            raise
        print(f"error: {package} is not installed: pip install {package}; all that is missing: doctor", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _overrides(args: argparse.Namespace) -> list[str]:
    return args.overrides + ([f"rollout.engine={args.engine}"] if args.engine else [])


def _train(args: argparse.Namespace) -> int:
    world_size, place = launcher.check_environment(args.nproc)
    recipe = load(args.recipe, _overrides(args))
    if recipe.trainer == "generate" and args.command == "train":
        raise UserError(f"{args.recipe} is a recipe of trainer generate: run it with `megatron-rft generate`")
    plan = check(recipe, world_size, getattr(args, "gpu_gib", None))
    is_rank = "RANK" in os.environ
    if not args.dry_run and not is_rank and _fetch_models(recipe):
        plan = check(recipe, world_size)  # there is more to check now
    if os.environ["RANK"] == "0" and launcher.PARENT not in os.environ if is_rank else place.node == 0:
        print(plan, flush=True)
    _check_own_code(recipe)
    check_writable(recipe.run.output_dir)
    if args.dry_run:
        return FINISHED
    make_folder(recipe.run.output_dir)
    if (world_size > 1 or args.job) and not is_rank:
        command = [sys.executable, "-m", "megatron_rft", args.command, args.recipe, *_overrides(args)]
        output_dir = recipe.run.output_dir
        job = args.job and Job(args.job, Path(output_dir), place.node, place.nodes)
        return launcher.launch(command, args.nproc or 1, output_dir, place, job)
    if recipe.trainer == "generate":
        launcher.see_one_gpu()
    return _work(recipe, _run)


def _fetch_models(recipe: Recipe) -> bool:
    """Models of the hub, before any rank starts. Whether there was something to fetch."""
    from megatron_rft.data.hub import is_here, model_folder

    critic, model = recipe.critic and recipe.critic.path, recipe.model
    named = {"model.path": model.path, "model.tokenizer": model.tokenizer, "model.reference": model.reference}
    missing = {option: path for option, path in (named | {"critic.path": critic}).items() if path and not is_here(path)}
    for option, path in missing.items():
        print(f"{option}: {path} comes from the Hugging Face hub", flush=True)
        model_folder(path, option)
    return bool(missing)


def _check_own_code(recipe: Recipe) -> None:
    """A recipe that names code of the user's: whether it can be used, before any rank starts."""
    if recipe.algorithm.name == "own":
        from megatron_rft.trainers import rl

        rl.build_objective(recipe)
    for reward in recipe.reward.everything():
        if reward.kind == "own":
            from megatron_rft.rewards.own import OwnReward

            OwnReward(reward.function, reward.maximum)


def _generate(args: argparse.Namespace) -> int:
    recipe = load(args.recipe, _overrides(args))
    if recipe.trainer != "generate":
        raise UserError(f"{args.recipe} is a recipe of trainer {recipe.trainer}: run it with `megatron-rft train`")
    return _train(args)


def _serve(args: argparse.Namespace) -> int:
    recipe = load(args.recipe, [*_overrides(args), "rollout.placement=server", "rollout.servers=[]"])
    check_writable(args.out, "--out")
    from megatron_rft.trainers import serve

    return serve.run(recipe, args.out)


def _run(recipe: Recipe) -> int:
    from megatron_rft import trainers  # imports torch

    return trainers.run(recipe)


def _work(recipe: Recipe, run: Callable[[Recipe], int]) -> int:
    """This process's part of the run, and its last words for whoever launched it."""
    launcher.die_with_launcher()
    for number in (signal.SIGTERM, signal.SIGUSR1):  # until the trainer has something to save
        signal.signal(number, lambda *_: sys.exit(STOPPED))
    try:
        status, message = run(recipe), ""
    except UserError as error:
        status, message = USER_ERROR, str(error)
    except RunFailed as error:
        status, message = FAILED, str(error)
    except Exception as error:
        if not isinstance(error, OSError) or error.errno != errno.ENOSPC:
            traceback.print_exc()
        status, message = FAILED, f"{type(error).__name__}: {error}"
    launcher.write_exit(recipe.run.output_dir, status, message)
    if message and launcher.PARENT not in os.environ:  # a launcher says it once for all ranks
        print(f"error: {message}", file=sys.stderr)
    return status


def _evaluate(args: argparse.Namespace) -> int:
    run_folder = Path(load(args.recipe, _overrides(args)).run.output_dir)
    model = args.model or str(run_folder / "export")
    from megatron_rft.trainers import convert, standalone

    source = convert.find_source(model, args.like, "--model")
    # A Megatron checkpoint has no *.safetensors, which `check` looks for: of its folder only the rest is used.
    initialise = "pretrained" if source.format == "hf" and source.path == source.companions else "random"
    place = [f"model.path={json.dumps(str(source.companions))}", f"model.initialise={initialise}"]
    recipe = load(args.recipe, [*_overrides(args), *place])
    check(recipe)
    out = args.out or run_folder / "evaluation" / (Path(model).name if source.format == "hf" else source.path.name)
    check_writable(out, "--out")
    return standalone.run(recipe, source, out)


def _convert(args: argparse.Namespace) -> int:
    from megatron_rft.trainers import convert

    file_bytes = round(args.file_gib * 2**30)
    return convert.run(args.source, args.out, args.to, args.like, args.tensor_parallel, file_bytes, args.logits)


def _harness(args: argparse.Namespace) -> int:
    check_writable(args.out, "--out")
    from megatron_rft.trainers import harness

    return harness.run(args.model, args.like, args.tasks.split(","), args.include, args.limit, args.out)


def _report(args: argparse.Namespace) -> int:
    from megatron_rft.tracking import report

    out = args.out or (args.runs[0] / "report" if len(args.runs) == 1 else Path("report"))
    page, picture, *charts = report.write(args.runs, out)
    print(f"{page}\n{picture} ({len(charts)} charts, each alone in {out / 'charts'})")
    return FINISHED


def _dynamics(args: argparse.Namespace) -> int:
    from megatron_rft.tracking import dynamics

    return _draw(dynamics.draw, args)


def _constraints(args: argparse.Namespace) -> int:
    from megatron_rft.tracking import constraints

    return _draw(constraints.draw, args)


def _draw(draw: Callable[[list[Path], Path], Path], args: argparse.Namespace) -> int:
    for run in args.runs:
        if not all((run / name).is_file() for name in ("metrics.jsonl", "recipe.yaml")):
            raise UserError(f"{run} is not the folder of a run: it has no metrics.jsonl and recipe.yaml")
    if args.out.suffix not in PICTURES:
        raise UserError(f"--out: {args.out} is no {', '.join(PICTURES)}")
    try:
        print(draw(args.runs, args.out))
    except OSError as error:
        raise UserError(f"--out: {args.out} cannot be written: {error.strerror}") from None
    return FINISHED


def _heatmap(args: argparse.Namespace) -> int:
    from megatron_rft.tracking import heatmap

    data = args.run / "refinements.jsonl"
    if not data.is_file():
        raise UserError(
            f"{args.run} has no refinements.jsonl: constraint.examples_every of a dynamic constraint writes it"
        )
    try:
        print(heatmap.write(args.run, data))
    except OSError as error:
        raise UserError(f"{args.run} cannot be written: {error.strerror}") from None
    return FINISHED


def _doctor(_args: argparse.Namespace) -> int:
    print(doctor.report())
    return USER_ERROR if doctor.missing() else FINISHED
