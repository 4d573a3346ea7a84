"""Error messages for a wrong recipe: the dotted option, the value and the fix."""

import string
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from megatron_rft.utils.errors import ConfigError, did_you_mean

Place = tuple[str, ...]

KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "model_type": "a section of options",
    "model_attributes_type": "a section of options",
    "dict_type": "a section of options",
}
BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def argument(name: str, kind: Any, value: Any) -> Any:
    """A function's argument, if it is a `kind`, the type of an option. Raises ConfigError."""
    try:
        return TypeAdapter(kind, config=ConfigDict(strict=True)).validate_python(value)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        place = "".join(f"[{part!r}]" for part in detail["loc"])
        raise ConfigError(f"{name}{place}: {explain(detail, (name,), ())[1]}") from None


def at(key: str, problem: str) -> PydanticCustomError:
    """The error to raise in a section's validator when its option `key` is wrong."""
    return PydanticCustomError("at", "{problem}", {"key": key, "problem": problem})


def shown(value) -> str:
    """A value in a recipe's notation."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def hint(name: str, known: Iterable[str]) -> str:
    """The known name that a wrong one may mean, else all of them; a sentence that begins with a space."""
    return did_you_mean(name, known := list(known)) or f" There are: {', '.join(known) or 'none'}."


def many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def check_braces(
    option: str, text: str, wanted: AbstractSet[str], optional: AbstractSet[str] = frozenset(), name: str = ""
) -> None:
    """Refuse a format string that lacks a `wanted` field or has one that is not `optional` either. `name`: of its
    file."""
    name = name or shown(text)
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
    except ValueError as error:
        raise at(option, f"{name}: {error}; literal braces are written {{{{ and }}}}") from None
    if fields - optional != wanted:
        must, may = (" and ".join(f"{{{field}}}" for field in sorted(some)) for some in (wanted, optional))
        raise at(option, f"{name} must have {must}{may and f', may have {may}'}, and nothing else in braces")


def explain(error: ErrorDetails, place: Place, known: Iterable[str], others: Iterable[str] = ()) -> tuple[Place, str]:
    """The option and the message of one of pydantic's errors. `known`: valid names at that position; `others`: the
    options of that name in other sections."""
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "at":
        return (*place, *context["key"].split(".")), context["problem"]
    if kind == "extra_forbidden":
        meant = f" Did you mean {' or '.join(others)}?" if others else hint(place[-1], sorted(known))
        return place, f"there is no such option.{meant}"
    if kind == "missing":
        return place, "is required"
    if kind == "string_type" and isinstance(value, dict | list | bool):
        return place, f"is not text: YAML reads {{...}}, [...] and off as values. Quote it: {'.'.join(place)}='\"...\"'"
    if kind.startswith("int_") and isinstance(value, float) and value.is_integer():
        return place, f"{shown(value)} has a decimal point or an exponent: write {int(value)}"
    if kind in KINDS:
        return place, f"{shown(value)} is not {KINDS[kind]}"
    if kind in BOUNDS:
        words, limit = BOUNDS[kind]
        return place, f"{shown(value)} is not {words} {context[limit]}"
    if kind == "literal_error":
        words = context["expected"].replace(" or ", ", ").split(",")
        return place, not_among(value, [word.strip("' ") for word in words])
    if kind == "value_error":
        return place, str(context["error"])
    return place, f"{error['msg']} (given: {shown(value)})"


def not_among(value, choices: Iterable[str]) -> str:
    meant = did_you_mean(value, choices) if isinstance(value, str) else ""
    return f"{shown(value)} is not one of {', '.join(choices)}.{meant}".removesuffix("." if not meant else "")
