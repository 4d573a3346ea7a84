"""A field that holds one of several sections, which an option such as `kind` chooses. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel
from pydantic_core import PydanticCustomError, core_schema

from megatron_rft.config.messages import at, not_among
from megatron_rft.utils.errors import closest

LABEL = "\0"  # begins the section's name, which pydantic puts into an error's place; no recipe has this character


@dataclass(frozen=True, eq=False)  # hashed by identity
class OneOf:
    """Annotates the field: Annotated[BaseSection, OneOf("kind", SECTIONS, "math")]. The options are checked against the
    chosen section alone. `default`: the choice where the recipe makes none."""

    tag: str
    sections: Mapping[str, type[BaseModel]]
    default: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        choices = {LABEL + name: handler.generate_schema(section) for name, section in self.sections.items()}
        union = core_schema.tagged_union_schema(choices, lambda value: LABEL + self._choice(value))
        return core_schema.no_info_before_validator_function(self._checked, union)

    def _choice(self, value: Any) -> Any:
        return value.get(self.tag, self.default) if isinstance(value, dict) else getattr(value, self.tag)

    def _checked(self, value: Any) -> Any:
        if not isinstance(value, dict | BaseModel):
            raise PydanticCustomError("model_type", "no section")
        if (choice := self._choice(value)) is None:
            raise at(self.tag, f"is required: one of {', '.join(self.sections)}")
        if not isinstance(choice, str) or choice not in self.sections:
            raise at(self.tag, not_among(choice, self.sections))
        return value


@dataclass(frozen=True)
class Choices:
    """The sections that a recipe may have at one place: `sections[chosen]` is there. `what` is chosen: a trainer, an
    algorithm, a kind."""

    what: str
    chosen: str
    sections: Mapping[str, type[BaseModel]]

    @classmethod
    def at(cls, place: tuple[str, ...], whole: OneOf) -> "Choices":
        """`place`: of an option, as pydantic gives it. Without LABELs `chosen` is empty, and `sections` are all."""
        what, chosen, sections = whole.tag, "", whole.sections
        for part in place[:-1]:
            if part.startswith(LABEL):
                chosen = part.removeprefix(LABEL)
                continue
            fields = {name: section.model_fields.get(part) for name, section in sections.items()}
            inside = {name: held for name, field in fields.items() if (held := _held(field))}
            if not inside:  # the index in a list, or a key that the user chose, such as a benchmark's name
                continue
            here = [inside[chosen]] if chosen in inside else inside.values()
            if unions := [held for held in here if isinstance(held, OneOf)]:
                what, chosen = part if unions[0].tag == "name" else unions[0].tag, ""
                sections = {name: section for union in unions for name, section in union.sections.items()}
            else:
                sections = {name: held for name, held in inside.items() if not isinstance(held, OneOf)}
        return cls(what, chosen, sections)

    @property
    def own(self) -> set[str]:
        """The options of the chosen section."""
        section = self.sections.get(self.chosen)
        return set(section.model_fields) if section else set()

    def having(self, option: str) -> list[str]:
        """The choices whose sections have the option."""
        return [name for name, section in self.sections.items() if option in section.model_fields]

    def nearest_elsewhere(self, option: str) -> tuple[str, list[str]] | None:
        """The option that `option` may mean, and the choices that have it, if the chosen section has none like it."""
        known = {name for section in self.sections.values() for name in section.model_fields}
        if closest(option, self.own) is None and (near := closest(option, known)):
            return near, self.having(near)
        return None

    def always_requires(self, option: str) -> bool:
        return all((field := each.model_fields.get(option)) and field.is_required() for each in self.sections.values())


def _held(kind: Any) -> OneOf | type[BaseModel] | None:
    """The OneOf, else the section, within a field or its type."""
    if isinstance(kind, OneOf) or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return kind
    parts = (*kind.metadata, kind.annotation) if hasattr(kind, "metadata") and hasattr(kind, "annotation") else None
    found = [held for part in parts or get_args(kind) if (held := _held(part))]
    return next((held for held in found if isinstance(held, OneOf)), found[0] if found else None)
