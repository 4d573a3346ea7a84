"""Entry point of `megatron-rft`: parses the command line, runs one command, and turns errors into exit statuses.

A recipe is validated before its command is imported, because most commands import torch, which takes seconds.
utils/errors.py has the exit statuses; Ctrl-C before there is anything to save exits with 130.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

from megatron_rft.commands import doctor
from megatron_rft.commands.parser import parse
from megatron_rft.config import load
from megatron_rft.launching import slurm
from megatron_rft.launching.job import Job
from megatron_rft.utils.errors import USER_ERROR, exit_status
from megatron_rft.utils.late_imports import lean_import

FILES = {"generate": "train", "plan": "train"}  # the others have the name of their command


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status. A user's error is printed to stderr without a traceback."""
    args = parse(arguments)
    if not sys.stderr.isatty():  # no progress bars in a log; packages read this variable when they are imported
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        return run(args)
    except ModuleNotFoundError as error:
        if not (package := doctor.package_of(error.name)):
            raise
        print(
            f"error: {package} is not installed: pip install {package}; `megatron-rft doctor` lists what is missing",
            file=sys.stderr,
        )
        return USER_ERROR
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        if (outcome := exit_status(error)) is None:
            raise
        status, message = outcome
        print(f"error: {message}", file=sys.stderr)
        if status == USER_ERROR and (job := getattr(args, "job", None)):  # the job's other nodes wait for this status
            Job(job, Path(), slurm.this_node()).conclude(USER_ERROR)
        return status


def run(args: argparse.Namespace) -> int:
    """Call `run` in the command's file. `args.loaded` is the validated recipe if the command takes one."""
    if hasattr(args, "recipe"):
        args.loaded = load(args.recipe, args.overrides)
    command = lean_import(f"megatron_rft.commands.{FILES.get(args.command, args.command)}")
    return command.run(args)
