"""Loads a recipe from files and overrides, and writes it back to a file.

    base: common.yaml            another recipe (relative to this file), or a list in which later ones override;
                                 mappings merge, null removes a key; options of an algorithm or a kind go
                                 if a stronger layer chooses one that lacks them
    rollout: {group_size: 16}

Overrides such as `rollout.group_size=8` or `pipo=null` are applied last. Their values are YAML.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_rft.config.messages import Place, explain
from megatron_rft.config.one_of import LABEL, Choices
from megatron_rft.config.recipe import Recipe
from megatron_rft.config.trainers import TRAINERS, WHOLE, validate
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError, first_line

COMMAND_LINE, CALL = "the command line", "the call"
DATA_SETS = (("data",), ("evaluation", "benchmarks"))  # in these sections an entry NAME is short for {path: NAME}
AnyRecipe = Recipe | str | Path | Mapping[str, Any]
Layers = list[tuple[str, dict]]  # (origin, content), the strongest last


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-6 is a number (YAML 1.1 requires 1.0e-6), 010 and 1:30 are text (not 8 and 90) and a duplicate
    key is an error. Errors have a line."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, key in enumerate(keys):
            if key in keys[:number]:
                raise yaml.constructor.ConstructorError(
                    problem=f"{str(key)!r} is given twice", problem_mark=node.value[number][0].start_mark
                )
        return super().construct_mapping(node, deep)

    def construct_object(self, node, deep=False):
        try:
            return super().construct_object(node, deep)
        except ValueError as error:  # a date that does not exist, or an integer with too many digits for int()
            raise yaml.constructor.ConstructorError(problem=first_line(error), problem_mark=node.start_mark) from None


class _Dumper(yaml.SafeDumper):
    """Quotes a text, such as the name 1e-6, that `_Loader` would read as a number."""


BASE_8_OR_60 = re.compile(r"^[-+]?(0[\d_]+|\d[\d_]*(:\d+)+(\.[\d_]*)?)$")
FLOAT = re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
for each in (_Loader, _Dumper):
    each.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+.0123456789"))
for first in "-+0123456789":  # text, before YAML 1.1 reads a number in it
    _Loader.yaml_implicit_resolvers[first].insert(0, ("tag:yaml.org,2002:str", BASE_8_OR_60))


def load(path: AnyRecipe, overrides: Sequence[str] = (), **sections: Any) -> Recipe:
    """Load the recipe at `path` with its bases and the overrides, and run all checks that do not depend on the machine.

    Args:
        path: a YAML file, a recipe's content as nested mappings, or a recipe.
        overrides: `section.option=value`, as on the command line.
        sections: the same by section, stronger: `rollout={"group_size": 16}, pipo=None`. In both kinds of mappings a
            function or a class may stand where a recipe names the user's code, or alone as `reward`.

    Raises:
        ConfigError: one line per problem, with its file and option.
    """
    path = path.model_dump(exclude_unset=True) if isinstance(path, Recipe) else path
    if not isinstance(path, str | Path | Mapping):
        raise ConfigError(f"recipe: {path!r:.80} is neither a file's path, nor options by section, nor a loaded recipe")
    layers = [(CALL, _plain(path))] if isinstance(path, Mapping) else _files(Path(path), [])
    layers += [(COMMAND_LINE, parse_override(text)) for text in overrides] + [(CALL, _plain(sections))]
    merged: dict = {}
    for _, layer in layers:
        merged = _merge(merged, layer)
    return _validated(_without_lost(_without_vllm(merged, layers), layers), layers)


def _without_vllm(merged: dict, layers: Layers) -> dict:
    """`merged` without what a base says to vLLM, where a stronger layer chooses the hf engine. Says so in a line."""
    options, rollout = merged.get("vllm"), merged.get("rollout")
    if isinstance(options, dict) and isinstance(rollout, dict) and rollout.get("engine") == "hf":
        chosen = _layer(("rollout", "engine"), layers)
        given = {option: _layer(("vllm", option), layers) for option in options}
        lost = [each for each, by in given.items() if by < chosen and (not by or layers[by][0] != layers[chosen][0])]
        if lost and "RANK" not in os.environ:
            print(f"left out, as rollout.engine is hf: vllm.{', vllm.'.join(lost)}", file=sys.stderr)
        merged["vllm"] = {option: value for option, value in options.items() if option not in lost}
    return merged


def _without_lost(merged: dict, layers: Layers) -> dict:
    """`merged` without options that an algorithm or kind lacks which a stronger layer has chosen. Says so in a line."""
    try:
        validate(merged)
    except ValidationError as error:
        lost: dict[str, list[str]] = {}
        unknown = [each["loc"] for each in error.errors(include_url=False) if each["type"] == "extra_forbidden"]
        for labelled in (tuple(map(str, place)) for place in unknown):
            *section, option = (part for part in labelled if not part.startswith(LABEL))
            choices = Choices.at(labelled, WHOLE)
            tag = "name" if choices.what == "algorithm" else choices.what
            chosen, given = (_layer((*section, each), layers) for each in (tag, option))
            if choices.having(option) and given < chosen and (not given or layers[given][0] != layers[chosen][0]):
                reduce(getitem, section, merged).pop(option)
                why = f"{choices.what} {choices.chosen} of {layers[chosen][0]} lacks"
                lost.setdefault(why, []).append(f"{'.'.join(section)}.{option} of {layers[given][0]}")
        for why, options in lost.items() if "RANK" not in os.environ else ():
            print(f"left out, as {why} them: {', '.join(options)}", file=sys.stderr)
    return merged


def _plain(value: Any, name: str = "") -> Any:
    """What YAML would have: code by its name, paths as text, and numpy's numbers and arrays as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each, str(key)) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if callable(value):
        return {"kind": "own", "function": user_code.here(value)} if name == "reward" else user_code.here(value)
    return value.tolist() if hasattr(value, "tolist") else str(value) if isinstance(value, Path) else value


def load_saved(path: Path) -> Recipe:
    """Load the recipe that a run wrote into its folder."""
    content = _merge({}, _read(path))
    return _validated(content, [(str(path), content)])


def dump(recipe: Recipe, given: bool = False) -> str:
    """The resolved recipe as YAML with every option, or the `given` ones. `load` of it gives an equal recipe."""
    content = recipe.model_dump(exclude_unset=given)
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _parsed(text: str, name: str, fix: str = "") -> Any:
    """The value of YAML; `name` is that of the text in errors."""
    try:
        value = yaml.load(text, _Loader)
        json.dumps(value, default=str, skipkeys=True)
        return value
    except ValueError:  # of json: a circular reference
        raise ConfigError(f"{name}: an alias (*name) stands within its own value") from None
    except RecursionError:
        raise ConfigError(f"{name}: its values are nested more deeply than can be read") from None
    except yaml.reader.ReaderError as error:
        line, problem = text.count("\n", 0, error.position), f"the character {chr(error.character)!r} is not allowed"
    except yaml.MarkedYAMLError as error:
        line, problem = error.problem_mark.line if error.problem_mark else 0, error.problem
    raise ConfigError(f"{name} is not valid YAML (line {line + 1}: {problem}){fix}")


def _read(path: Path) -> dict:
    try:
        content = _parsed(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(f"no recipe can be read at {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x}): save the recipe as UTF-8"
        ) from None
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path} is not a recipe: its top level must be sections such as `run:` and `model:`")
    return content or {}


def _files(path: Path, above: list[Path]) -> Layers:
    """The layers of `path` and its bases, the strongest last."""
    if path.resolve() in (other.resolve() for other in above):
        raise ConfigError(f"recipes inherit from each other in a circle: {' -> '.join(map(str, [*above, path]))}")
    content = _read(path)
    bases = content.pop("base", None)
    bases = bases if isinstance(bases, list) else [] if bases is None else [bases]
    layers: Layers = []
    for base in bases:
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base must be the path of another recipe, or a list of some, not {base!r}")
        layers += _files(path.parent / base, [*above, path])
    return [*layers, (str(path), content)]


def parse_override(text: str) -> dict:
    """`a.b=1` -> {"a": {"b": 1}}."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{text!r} is not an override: write section.option=value")
    try:
        text.encode()
    except UnicodeEncodeError:  # Python keeps other bytes of an argument as lone surrogates
        raise ConfigError(f"the override {text!r} is not UTF-8 text: set the terminal to UTF-8") from None
    shown = text if len(text) <= 100 else f"{text[:100]}..."
    if not value.strip():
        raise ConfigError(f"the override {shown!r} has no value: {key}=null takes the default")
    nested = _parsed(value, f"the value of the override {shown!r}", "; quote it")
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def _merge(below: dict, above: dict, section: Place = ()) -> dict:
    """`below` overridden by `above`: mappings merge, other values replace, null removes."""
    merged = dict(below)
    for key, value in above.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            lower = merged.get(key)
            if isinstance(lower, str) and section in DATA_SETS and not {"path", "adapter"} & value.keys():
                lower = {"path": lower}  # `test: math500`, and then data.test.limit=40
            merged[key] = _merge(lower if isinstance(lower, dict) else {}, value, (*section, key))
        else:
            merged[key] = value
    return merged


def _validated(merged: dict, layers: Layers) -> Recipe:
    try:
        recipe = validate(merged)
        recipe.algorithm.model_fields_set.intersection_update(dict(merged.get("algorithm", {})))  # not the constraint's
        return recipe
    except ValidationError as error:
        found = map(_explained, error.errors(include_url=False))
        lines = [f"{_origin(place, layers)}: {'.'.join(place) or 'the recipe'}: {problem}" for place, problem in found]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None


def _explained(error: ErrorDetails) -> tuple[Place, str]:
    """The option and the message of one of pydantic's errors: also which trainer or kind has an option that this one
    lacks."""
    labelled = tuple(map(str, error["loc"]))
    place = tuple(part for part in labelled if not part.startswith(LABEL))
    choices = Choices.at(labelled, WHOLE)
    here, others = f"{choices.what} {choices.chosen}", choices.having(place[-1]) if place else []
    if error["type"] == "extra_forbidden" and others:
        fix = "leave it out, or set it to null to undo a base"
        return place, f"does nothing with {here}, only with {', '.join(others)}: {fix}"
    elsewhere = options_named(place[-1]) if error["type"] == "extra_forbidden" else []
    if error["type"] == "extra_forbidden" and not elsewhere and (near := choices.nearest_elsewhere(place[-1])):
        option, others = near
        return place, f"there is no such option with {here}. Did you mean {option!r}, of {', '.join(others)}?"
    if error["type"] == "missing" and not choices.always_requires(place[-1]):
        field = choices.sections[choices.chosen].model_fields[place[-1]]
        return place, f"is required with {here}" + (f": {field.description}" if field.description else "")
    return explain(error, place, choices.own, elsewhere)


def options_named(name: str) -> list[str]:
    """The options of all sections that have a name: run.seed for seed."""
    sections = {section: None for recipe in TRAINERS.values() for section in recipe.model_fields}
    if name in sections:
        return []
    return [f"{each}.{name}" for each in sections if Choices.at((each, name), WHOLE).having(name)]


def _origin(place: Place, layers: Layers) -> str:
    """The strongest layer that sets this option, else the recipe itself."""
    if (number := _layer(place, layers)) >= 0:
        return layers[number][0]
    return next((name for name, _ in reversed(layers) if name not in (COMMAND_LINE, CALL)), CALL)


def _layer(place: Place, layers: Layers) -> int:
    """The number of the strongest layer that sets this option; -1 if none does."""
    for number in reversed(range(len(layers))):
        value: Any = layers[number][1]
        for part in place:
            if isinstance(value, list):
                break
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            return number
    return -1
