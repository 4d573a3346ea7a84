"""Defines the command line, `megatron-rft COMMAND ...`. Each command has its own file."""

import argparse
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

from megatron_rft import __version__
from megatron_rft.config.engines import ENGINES


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="megatron-rft", description="Reinforcement fine-tuning on megatron-core.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = partial(commands.add_parser, allow_abbrev=False)

    train = add("train", help="train a recipe, or resume its run")
    _add_recipe(train)
    _add_launch(train, "ranks")

    generate = add("generate", help="sample and grade trajectories into a store")
    _add_recipe(generate)
    _add_launch(generate, "workers")

    serve = add("serve", help="start vLLM servers on this node for a run on other nodes")
    _add_recipe(serve)
    serve.set_defaults(fixed=["rollout.placement=server", "rollout.servers=[]"])
    serve.add_argument("--out", type=Path, default=Path("servers"), metavar="FOLDER", help="for logs and URLs")
    serve.add_argument("--host", metavar="NAME", help="at which the run reaches this node (default: the node's name)")

    plan = add("plan", help="check a recipe and print batch, layout and memory: train --dry-run")
    _add_recipe(plan)
    plan.add_argument("--nproc", "--gpus", type=_count, metavar="N", help="number of ranks (default: 1)")
    plan.add_argument("--gpus-per-node", type=_count, metavar="N", help="default: all ranks are on one node")
    plan.add_argument("--gpu-gib", type=_size, metavar="GIB", help="memory of one GPU, which the run must fit")
    plan.add_argument("--search", action="store_true", help="with --gpu-gib: rank other layouts that fit by speed")
    plan.add_argument("--device", help="with --search: a100, h100, h20, h200 or b200 (default: h100)")
    plan.add_argument("--for", dest="job_of", choices=("train", "generate"), help="the command that is planned")
    plan.set_defaults(dry_run=True, job=None)

    rehearse = add("rehearse", help="rehearse a step at full size without GPUs: memory, messages, time")
    _add_recipe(rehearse)
    rehearse.add_argument("--gpus", "--nproc", type=_count, default=8, metavar="N", help="ranks (default: 8)")
    rehearse.add_argument("--device", default="h100", help="a100, h100, h20, h200 or b200 (default: h100)")
    rehearse.add_argument("--gpus-per-node", type=_count, default=8, metavar="N", help="default: 8")
    rehearse.add_argument("--fraction", type=float, default=0.5, help="mean of responses / the longest (default: 0.5)")
    rehearse.add_argument("--micro-batches", type=_count, metavar="N", help="micro-batches per rank (default: few)")
    rehearse.add_argument("--training-only", action="store_true", help="only loading and updates: a third of the time")
    rehearse.add_argument("--json", type=Path, metavar="FILE", help="write all counts to this file")

    evaluate = add("evaluate", help="evaluate a model on a recipe's problems")
    _add_recipe(evaluate)
    evaluate.add_argument("--model", help="as the source of convert (default: the run's export)")
    evaluate.add_argument("--like", metavar="MODEL", help="model with config.json and tokenizer, if MODEL has none")
    evaluate.add_argument("--out", type=Path, metavar="FOLDER", help="for results (default: RUN/evaluation/MODEL)")

    environment = add("environment", help="check a recipe's environment: play turns twice and compare")
    environment.add_argument("action", choices=("check",))
    _add_recipe(environment)
    environment.add_argument("--episodes", type=_count, default=16, metavar="N", help="default: 16")
    environment.add_argument("--turns", type=Path, metavar="FILE", help="JSON lists of the policy's texts, one a line")

    diagnose = add("diagnose", help="say whether engine and trainer differ by rounding or by a bug, and whose")
    _add_recipe(diagnose)
    diagnose.add_argument("--nproc", type=_count, metavar="N", help="ranks on this node (default: 1, without launcher)")
    diagnose.add_argument("--run", type=Path, metavar="RUN", help="use the weights of this run's newest checkpoint")
    diagnose.add_argument("--prompts", type=_count, default=8, metavar="N", help="of data.train (default: 8)")

    convert = add("convert", help="convert a checkpoint to Hugging Face or Megatron format")
    convert.add_argument("source", help="Hugging Face folder or hub name, torch_dist checkpoint, or RUN")
    convert.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    convert.add_argument("--to", choices=("hf", "megatron", "peft"), help="format of OUT (default: not the source's)")
    convert.add_argument("--like", metavar="MODEL", help="model with config.json and tokenizer, if the source has none")

    report = add("report", help="write a page about runs, with charts and samples")
    report.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="output folders; seeds are joined")
    report.add_argument("--out", type=Path, metavar="FOLDER", help="default: RUN/report, or report for several runs")

    status = commands.add_parser("status", help="show a run's progress, from its files")
    status.add_argument("run", type=Path, metavar="RUN", help="output folder of a run")

    commands.add_parser("doctor", help="show what is installed, and what a run would use")
    return top


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.add_argument("recipe", metavar="RECIPE", help="a YAML file")
    command.add_argument("overrides", nargs="*", default=[], metavar="section.option=value", help="override the file")
    command.add_argument("--engine", choices=("auto", *ENGINES), help="the same as rollout.engine=...")
    command.set_defaults(fixed=[])


def _add_launch(command: argparse.ArgumentParser, processes: str) -> None:
    command.add_argument("--nproc", type=_count, metavar="N", help=f"{processes} on this node (default: 1)")
    command.add_argument("--dry-run", action="store_true", help="check the recipe, print its plan and stop")
    command.add_argument("--job", type=Path, metavar="FOLDER", help="notes of a job that the queue may restart")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line. Overrides may stand before and after options, which argparse alone does not allow.
    `overrides` of the result has all overrides of the recipe file, also those from options."""
    given = sys.argv[1:] if arguments is None else arguments
    args, rest = parser().parse_known_args(given)
    if any(text.startswith("-") for text in rest) or rest and not hasattr(args, "overrides"):
        parser().error(f"{args.command} does not take {' '.join(rest)}")
    if hasattr(args, "overrides"):
        engine = [f"rollout.engine={args.engine}"] if args.engine else []
        args.overrides = [*args.overrides, *rest, *engine, *args.fixed]
    return args


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _size(text: str) -> float:
    with suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB")
