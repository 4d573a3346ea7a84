"""Entry point of `megatron-rft`: parses the command line, runs one command, and turns errors into exit statuses.

A recipe is validated before its command is imported, because most commands import torch, which takes seconds. The exit
statuses are in utils/exit_codes.py; Ctrl-C before there is anything to save ends with 130.
"""

import argparse
import importlib
import os
import signal
import sys
import warnings
from pathlib import Path

from megatron_rft.commands import doctor
from megatron_rft.commands.parser import parse
from megatron_rft.config import load
from megatron_rft.launching import slurm
from megatron_rft.launching.job import Job
from megatron_rft.utils.errors import RunFailed, UserError, disk_full, disk_is_full
from megatron_rft.utils.exit_codes import FAILED, USER_ERROR

# Warnings that megatron-core causes on every rank, and that no user can act on. `doctor` reports on apex.
NOISE = (
    ".*Apex (is|are) not installed",
    "full scope is deprecated",
    "The .grad attribute of a Tensor that is not a leaf",
    "`torch.distributed.* is deprecated",
)
FILES = {"generate": "train", "plan": "train", "harness": "lm_eval"}  # the others have the name of their command


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status. A mistake of the user's is one line on stderr, without a traceback."""
    args = parse(arguments)
    for message in NOISE:
        warnings.filterwarnings("ignore", message=message)
    if not sys.stderr.isatty():  # no progress bars of other packages in a log; they read this when they are imported
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        return run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        if job := getattr(args, "job", None):  # the job's other nodes wait for this node's status
            node = slurm.this_node()
            Job(job, Path(), node.index, node.count).conclude(USER_ERROR)
        return USER_ERROR
    except RunFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except ModuleNotFoundError as error:
        if not (package := doctor.package_of(error.name)):
            raise
        print(f"error: {package} is not installed: pip install {package}; all that is missing: doctor", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:  # the reader of a pipe, `| head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if not disk_is_full(error):
            raise
        print(f"error: {disk_full(error)}", file=sys.stderr)
        return FAILED


def run(args: argparse.Namespace) -> int:
    """Each command is `run` in its file of `commands`. Those that take a recipe get it validated."""
    recipe = [load(args.recipe, args.overrides)] if hasattr(args, "recipe") else []
    command = importlib.import_module(f"megatron_rft.commands.{FILES.get(args.command, args.command)}")
    return command.run(*recipe, args)
