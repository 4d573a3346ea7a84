"""The page that shows what a run's refiner changed, and each token's cross entropy, as figure 6 of the dynamic
constraint's paper does: `python examples/figures.py heatmap RUN --out FILE.html`.

The page has no script and loads nothing. The run's samples have a few pairs.
"""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from megatron_rft.utils.files import read_json_lines

TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)


def draw(runs: list[Path], out: Path) -> Path:
    """Write the page of each run: `out`, or with several runs a file beside it with the run's name."""
    for run in runs:
        lines = read_json_lines(run / "samples.jsonl")
        if not any(pairs(line) for line in lines):
            raise ValueError(f"{run}/samples.jsonl has no refinements: a run with constraint.kind=dynamic writes some")
        path = out if len(runs) == 1 else out.with_stem(f"{out.stem}_{run.resolve().name}")
        path.write_text(render(run.resolve().name, lines), encoding="utf-8")
    return out


def pairs(line: dict) -> list[tuple[dict, dict]]:
    """The responses and their refinements of a step."""
    sides = [[sample for sample in line["samples"] if sample["kind"] == kind] for kind in ("to be refined", "refined")]
    return list(zip(*sides, strict=True))


def render(name: str, lines: list[dict]) -> str:
    """The page of a run. `lines`: of samples.jsonl."""
    steps = [(line["step"], pairs(line)) for line in lines]
    return TEMPLATES.get_template("heatmap.html").render(name=name, steps=steps)
