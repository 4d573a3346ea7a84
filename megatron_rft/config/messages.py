"""Error messages for a wrong recipe: the dotted option, the value and the fix."""

from collections.abc import Iterable

from pydantic_core import PydanticCustomError

from megatron_rft.utils.errors import did_you_mean

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


def at(key: str, problem: str) -> PydanticCustomError:
    """The error to raise in a section's validator when its option `key` is wrong."""
    return PydanticCustomError("at", "{problem}", {"key": key, "problem": problem})


def shown(value) -> str:
    """A value in a recipe's notation."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def explain(error: dict, place: Place, known: Iterable[str]) -> tuple[Place, str]:
    """The option and the message of one of pydantic's errors. `known`: valid names at that position."""
    kind, context, value = error["type"], error.get("ctx", {}), error.get("input")
    if kind == "at":
        return (*place, *context["key"].split(".")), context["problem"]
    if kind == "extra_forbidden":
        hint = did_you_mean(place[-1], known) or f" There are: {', '.join(sorted(known))}."
        return place, f"there is no such option.{hint}"
    if kind == "missing":
        return place, "is required"
    if kind in KINDS:
        return place, f"{shown(value)} is not {KINDS[kind]}"
    if kind in BOUNDS:
        words, limit = BOUNDS[kind]
        return place, f"{shown(value)} is not {words} {context[limit]}"
    if kind == "literal_error":
        return place, _not_among(value, context["expected"])
    if kind == "union_tag_invalid":
        return (*place, "name"), _not_among(context["tag"], context["expected_tags"])
    if kind == "value_error":
        return place, str(context["error"])
    return place, f"{error['msg']} (given: {shown(value)})"


def _not_among(value, expected: str) -> str:
    """`expected`: pydantic's list of choices, such as "'a', 'b' or 'c'"."""
    choices = [choice.strip("' ") for choice in expected.replace(" or ", ", ").split(",")]
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    return f"{shown(value)} is not one of {', '.join(choices)}.{hint}".removesuffix("." if not hint else "")
