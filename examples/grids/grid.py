"""Reads a paper's grid: the runs of each of its tables and figures. Requires only PyYAML.

Fields of PAPER.yaml:

    seeds, options   of every run of the paper; `options` do not change the name of a run's folder
    models           SIZE: the recipes' folder; path, the model that training starts from; `has`, options that the
                     recipes of this model already have; a row with one of them is the run without it
    store            recipe of the trajectories that rows train on, unless they have `store: false`
    files            benchmarks that are not on the hub, by name; --files FOLDER has them
    tables           NAME: title, models, columns, rows; `options` and `seeds` of the table; `metric` (default: pass@1);
                     `figure`, what draws it; `checkpoints`, the steps at which its curves are evaluated

A column is a list of benchmarks whose problems it joins ("test" is the recipe's data.test), with a `domain` if columns
have different runs; or `mean`, of the columns since the last mean; or `hours` of training; or `{hours_to: 73}`, until a
validation in the run reaches 73%; or `held_out`, the best validation in the run. A row is a method: its recipe and
options, `trained: false` for the model that training starts from, and the paper's numbers in the order of the columns.
"""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

GRIDS = Path(__file__).parent
EXAMPLES = GRIDS.parent


class GridError(ValueError):
    """The grid does not have this name."""


@dataclass(frozen=True)
class Column:
    name: str
    kind: str  # parts, mean, hours, hours_to or held_out
    parts: tuple[str, ...] = ()
    domain: str = ""
    accuracy: float = 0.0  # of hours_to, in %


@dataclass(frozen=True)
class Row:
    method: str
    recipe: str
    options: list[str] = field(default_factory=list)
    trained: bool = True
    store: bool = True
    paper: Any = ""  # cells, separated by spaces, "-" for none; by model where the table has several

    def cells(self, model: str) -> list[str]:
        text = self.paper.get(model, "") if isinstance(self.paper, dict) else self.paper
        return str(text).split()


@dataclass(frozen=True)
class Run:
    """One training run, or (`trained` false) the model that training starts from."""

    recipe: Path
    folder: Path
    options: tuple[str, ...]
    trained: bool
    model: str  # path of the model that training starts from
    domain: str = ""
    store: Path | None = None  # recipe of the trajectories
    trajectories: Path | None = None


@dataclass(frozen=True)
class Table:
    """A table or figure for one model."""

    paper: dict
    content: dict
    model: str
    runs: Path = Path("runs")
    files: Path | None = None
    chosen_seeds: tuple[int, ...] = ()
    evaluation: str = "export"  # name of the evaluation's folder in a run

    @property
    def columns(self) -> list[Column]:
        return [_column(name, given) for name, given in self.content.get("columns", {}).items()]

    @property
    def rows(self) -> list[Row]:
        return [Row(**given) for given in self.content["rows"]]

    @property
    def domains(self) -> list[str]:
        return list(dict.fromkeys(column.domain for column in self.columns if column.kind != "mean")) or [""]

    @property
    def parts(self) -> list[str]:
        """Names of the evaluated benchmarks."""
        return [part for column in self.columns for part in column.parts]

    def seeds(self, row: Row) -> list[int]:
        """The seeds of a row; one for a model that is not trained."""
        seeds = list(self.chosen_seeds) or self.content.get("seeds") or self.paper["seeds"]
        return seeds if row.trained else seeds[:1]

    def run(self, row: Row, domain: str, seed: int) -> Run:
        about = self.paper["models"][self.model]
        named = [option for option in row.options if option not in about.get("has", [])]
        recipe = Path(self._filled(row.recipe, domain))
        apart = "" if "{domain}" in row.recipe else domain
        seeded = f"seed_{seed}" if row.trained else ""
        name = "-".join([recipe.stem if row.trained else "base", *map(label, named)])
        folder = self.runs / recipe.parent / seeded / apart / name
        options = [*self.paper["options"], *self.content.get("options", []), *named]
        found = {"recipe": EXAMPLES / recipe, "folder": folder, "trained": row.trained, "domain": domain}
        found["model"] = about["path"]
        found["options"] = (*(self._filled(option, domain) for option in options), f"run.seed={seed}")
        if row.store and (store := self.paper.get("store")):
            store = self._filled(store, domain)
            found |= {"store": EXAMPLES / store, "trajectories": self.runs / Path(store).parent / "trajectories"}
        return Run(**found)

    def all_runs(self) -> list[Run]:
        """All runs, each once, in the order of the rows."""
        found = {}
        for row in self.rows:
            for domain in self.domains:
                for seed in self.seeds(row):
                    run = self.run(row, domain, seed)
                    found.setdefault(run.folder, run)
        return list(found.values())

    def _filled(self, text: str, domain: str) -> str:
        if "{files}" in text and self.files is None:
            raise GridError(f"--files: {self.content['title'].partition(':')[0]} reads files that no hub has: {text}")
        known = {"model": self.paper["models"][self.model]["folder"], "domain": domain, "files": str(self.files)}
        for name, value in known.items():
            text = text.replace("{" + name + "}", value)
        return text


def papers() -> list[str]:
    return sorted(path.stem for path in GRIDS.glob("*.yaml"))


def read(paper: str) -> dict:
    return yaml.safe_load((GRIDS / f"{one_of('paper', paper, papers())}.yaml").read_text(encoding="utf-8"))


def tables(paper: str, name: str, model: str | None = None, **options: Any) -> list[Table]:
    """The tables for one model, or for each. Raises GridError."""
    content = read(paper)
    table = content["tables"][one_of(f"table or figure of {paper}", name, content["tables"])]
    models = table.get("models", list(content["models"])[:1])
    chosen = [one_of(f"--model of {paper} {name}", model, models)] if model else models
    return [Table(content, table, each, **options) for each in chosen]


def one_of(what: str, name: str, known: Any) -> str:
    if name in known:
        return name
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    raise GridError(f"{what}: there is no {name!r}. {hint}There are: {', '.join(known)}")


def _column(name: str, given: Any) -> Column:
    if isinstance(given, str):
        return Column(name, given)
    if "hours_to" in given:
        return Column(name, "hours_to", accuracy=given["hours_to"])
    given = given if isinstance(given, dict) else {"parts": given}
    return Column(name, "parts", tuple(given["parts"]), given.get("domain", ""))


def label(option: str) -> str:
    name, _, value = option.partition("=")
    return f"{name.rpartition('.')[2]}_{value}"
