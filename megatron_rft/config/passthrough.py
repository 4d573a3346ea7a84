"""The fields of other libraries' configuration classes that a recipe may set; refused.yaml has those that it may not.

`ast` reads megatron-core's names and types from the installed sources, because importing it takes seconds and imports
torch. A field is refused if this package sets it itself, or if it would have no effect or a harmful one.
"""

import ast
import importlib.util
from collections.abc import Container, Iterable
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Optional, Union

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_rft.config.messages import at, explain, shown
from megatron_rft.utils.errors import ConfigError, did_you_mean

SOURCES = {  # by section
    "megatron": (
        "transformer/transformer_config.py",
        "model_parallel_config.py",
        "distributed/distributed_data_parallel_config.py",
    ),
    "optimizer": ("optimizer/optimizer_config.py",),
}
CLASSES = {"TransformerConfig", "ModelParallelConfig", "DistributedDataParallelConfig", "OptimizerConfig"}

Fields = dict[str, ast.expr]  # name -> annotation
TYPES: dict[str, Any] = {kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, type)}
TYPES |= {"Any": Any, "List": list, "Literal": Literal, "Optional": Optional, "Union": Union}
TYPES["torch"] = SimpleNamespace(dtype=Literal["float32", "bfloat16", "float16", "uint8"])  # by name


class Foreign:
    """A type of which no value in a recipe is."""


@cache
def megatron_core() -> Path:
    """The folder of the installed megatron-core, found without importing it."""
    spec = importlib.util.find_spec("megatron")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / "core" / "model_parallel_config.py").exists():
            return Path(folder) / "core"
    raise ConfigError("megatron-core is not installed: pip install megatron-core psutil")


@cache
def fields(section: str) -> Fields:
    """Name -> annotation of each field of the section's configuration classes of megatron-core."""
    found = (class_fields(megatron_core() / source, CLASSES) for source in SOURCES[section])
    return {name: kind for of_class in found for name, kind in of_class.items()}


def class_fields(source: Path, names: Container[str]) -> Fields:
    """Name -> annotation of the public fields of the classes `names` in a Python file, which is not imported."""
    return {
        item.target.id: item.annotation
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in names
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and not item.target.id.startswith("_")
    }


@cache
def refused() -> dict[str, dict[str, str]]:
    """Section -> reason -> names."""
    return yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text(encoding="utf-8"))


def reason_to_refuse(section: str, name: str) -> str | None:
    reasons = refused()[section].items()
    return next((why for why, patterns in reasons if any(fnmatch(name, each) for each in patterns.split())), None)


def wrong_value(annotation: ast.expr, value: Any, library: str, other: Any) -> str | None:
    """The problem with `value` for a field of `library` with this annotation; None if it fits. `other`: stands for
    types that are not Python's own."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):  # in quotes
        annotation = ast.parse(annotation.value, mode="eval").body
    names = {node.id: other for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    kind = eval(ast.unparse(annotation), {"__builtins__": {}}, names | TYPES)
    try:
        TypeAdapter(kind, config={"arbitrary_types_allowed": True}).validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "literal_error":
            return explain(first, (), ())[1]
        return f"{shown(value)} does not fit its type in {library}, {ast.unparse(annotation)}"
    return None


def check(section: str, given: dict[str, Any], typed: Iterable[str], known: Fields, library: str, other: Any) -> None:
    """Refuse fields that a recipe may not set. `typed`: the section's own options, for suggestions."""
    for name, value in given.items():
        if name not in known:
            usable = {*typed, *(each for each in known if not reason_to_refuse(section, each))}
            raise at(name, f"neither this package nor {library} has it.{did_you_mean(name, usable)}")
        if reason := reason_to_refuse(section, name):
            raise at(name, f"cannot be set: it {reason}")
        if problem := wrong_value(known[name], value, library, other):
            raise at(name, problem)


def check_megatron_core(section: str, given: dict[str, Any], typed: Iterable[str]) -> None:
    """The same for the section megatron or optimizer."""
    if given:  # importing this package builds default sections, which must work without megatron-core
        check(section, given, typed, fields(section), "the installed megatron-core", Foreign)
