"""The page that shows what a run's refiner changed, and each token's cross entropy, as figure 6 of the dynamic
constraint's paper does: `python examples/figures.py heatmap RUN --out FILE.html`.

The page has no script and loads nothing; docs/metrics.md describes the run's file.
"""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from megatron_rft.utils.files import read_json_lines

TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)


def draw(runs: list[Path], out: Path) -> Path:
    """Write the page of each run: `out`, or with several runs a file beside it with the run's name."""
    for run in runs:
        data = run / "refinements.jsonl"
        if not data.is_file():
            raise ValueError(f"there is no {data}: a run with constraint.kind=dynamic and examples_every writes it")
        path = out if len(runs) == 1 else out.with_stem(f"{out.stem}_{run.resolve().name}")
        path.write_text(render(run.resolve().name, read_json_lines(data)), encoding="utf-8")
    return out


def render(name: str, lines: list[dict]) -> str:
    """The page of a run. `lines`: of refinements.jsonl."""
    return TEMPLATES.get_template("heatmap.html").render(name=name, lines=lines)
