"""`megatron-rft heatmap`: writes a page that shows what a run's refiner changed, token by token."""

import argparse

from megatron_rft.report import refinements
from megatron_rft.utils.errors import FINISHED, UserError


def run(args: argparse.Namespace) -> int:
    data = args.run / "refinements.jsonl"
    if not data.is_file():
        raise UserError(
            f"{args.run} has no refinements.jsonl, which a run with constraint.kind=dynamic and examples_every writes"
        )
    try:
        print(refinements.write(args.run, data))
    except OSError as error:
        raise UserError(f"{args.run} cannot be written: {error.strerror}") from None
    return FINISHED
