"""`megatron-rft heatmap`: writes a page that shows what a run's refiner changed, and each token's cross entropy (figure
6 of the paper). The page has no script and loads nothing; docs/metrics.md describes the run's file.
"""

import argparse

from megatron_rft.report.page import TEMPLATES
from megatron_rft.utils.errors import FINISHED, UserError
from megatron_rft.utils.files import read_json_lines


def run(args: argparse.Namespace) -> int:
    data, path = args.run / "refinements.jsonl", args.run / "refinements.html"
    if not data.is_file():
        raise UserError(
            f"{args.run} has no refinements.jsonl, which a run with constraint.kind=dynamic and examples_every writes"
        )
    try:
        path.write_text(render(args.run.resolve().name, read_json_lines(data)), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{args.run} cannot be written: {error.strerror}") from None
    print(path)
    return FINISHED


def render(name: str, lines: list[dict]) -> str:
    """The page of a run. `lines`: of refinements.jsonl."""
    return TEMPLATES.get_template("refinements.html").render(name=name, lines=lines)
