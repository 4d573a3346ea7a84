"""Draws the papers' figures from any runs.

    python examples/figures.py online RUN ... --out FILE         # PIPO, figures 2, 3b, 4 and 5
    python examples/figures.py constraints RUN ... --out FILE    # the dynamic constraint, figures 4, 5 and 7
    python examples/figures.py dynamics RUN ... --out FILE       # FPA, figures 2, 3, 4, 5 and 8
    python examples/figures.py heatmap RUN --out FILE.html       # the dynamic constraint, figure 6: a page
    python examples/figures.py scaling 8 128 --out FILE          # PIPO, figure 3a: for group sizes, without runs

FILE is a .png, .pdf or .svg (default: KIND.png). Runs that differ in their seed are one line.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from examples.dynamic import constraints, heatmap  # noqa: E402
from examples.fpa import dynamics  # noqa: E402
from examples.pipo import online  # noqa: E402

FROM_RUNS = {"online": online.draw, "constraints": constraints.draw, "dynamics": dynamics.draw, "heatmap": heatmap.draw}
GROUP_SIZES = (8, 128)


def scaling(sizes: tuple[int, ...], out: Path) -> Path:
    from examples.pipo import scaling  # needs torch

    return scaling.draw(sizes, out)


def of_table(kind: str, table: Any, out: Path) -> str:
    """Draw the figure of a grid's finished runs (examples/grids). Returns its path and the missing runs."""
    if kind == "scaling":
        return str(scaling(GROUP_SIZES, out))
    folders = [run.folder for run in table.all_runs() if run.trained]
    if kind == "heatmap":
        out = out.with_suffix(".html")
    there = [folder for folder in folders if (folder / "metrics.jsonl").is_file()]
    if not there:
        raise ValueError(f"none of the {len(folders)} runs has begun: {', '.join(map(str, folders))}")
    missing = [str(folder) for folder in folders if folder not in there]
    note = f"\nMissing, {len(missing)} of {len(folders)} runs: {', '.join(missing)}" if missing else ""
    return f"{FROM_RUNS[kind](there, out)}{note}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=(*FROM_RUNS, "scaling"))
    parser.add_argument("runs", nargs="*", metavar="RUN", help="output folders; of scaling: group sizes")
    parser.add_argument("--out", type=Path, metavar="FILE", help=".png, .pdf or .svg (default: KIND.png)")
    args = parser.parse_args(arguments)
    out = args.out or Path(f"{args.kind}.{'html' if args.kind == 'heatmap' else 'png'}")
    try:
        if args.kind == "scaling":
            print(scaling(tuple(map(int, args.runs)) or GROUP_SIZES, out))
        elif args.runs:
            print(FROM_RUNS[args.kind]([Path(run) for run in args.runs], out))
        else:
            parser.error("give the folder of a run")
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
