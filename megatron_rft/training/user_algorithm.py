"""An algorithm of the user's: a dataclass in a file that the recipe names, its fields the options."""

import dataclasses
import inspect
import typing
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_rft.config import Recipe
from megatron_rft.config.messages import explain
from megatron_rft.objectives.base import PolicyObjective
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError, did_you_mean

OPTION = "algorithm.objective"
CAN_NEED = ("old_logprobs", "ref_logprobs", "ref_kl", "reference", "values")


def build_objective(recipe: Recipe, filled: dict[str, Any]) -> PolicyObjective:
    """The objective with its options; of what the trainer fills in (`filled`) it gets what it has fields for."""
    cls = _class(recipe.algorithm.objective)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    options = recipe.algorithm.model_extra | {"epochs": recipe.algorithm.epochs}
    if "epochs" not in fields and options.pop("epochs") != 1:
        raise ConfigError(f"algorithm.epochs does nothing: {cls.__name__} has no field epochs")
    if "mini_batches" not in fields and filled["mini_batches"] != 1:
        raise ConfigError(f"algorithm.mini_batch_prompts does nothing: {cls.__name__} has no field mini_batches")
    own_names = fields.keys() - filled.keys()
    for name in options.keys() - own_names:
        hint = did_you_mean(name, own_names) or f" There are: {', '.join(sorted(own_names)) or 'none'}."
        raise ConfigError(f"algorithm.{name}: {cls.__name__} has no such field.{hint}")
    hints = typing.get_type_hints(cls, include_extras=True)
    options = {name: _typed(name, value, hints[name]) for name, value in options.items()}
    try:
        objective = cls(**options, **{name: value for name, value in filled.items() if name in fields})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{OPTION}: {cls.__name__} cannot be made with these options: {error}") from None
    _check_needs(recipe, objective)
    return objective


def _class(named: str) -> type[PolicyObjective]:
    found = user_code.load(named, OPTION)
    if not (isinstance(found, type) and issubclass(found, PolicyObjective)):
        raise ConfigError(
            f"{OPTION}: {named} is no class that derives from megatron_rft.objectives.base.PolicyObjective, or from an "
            "algorithm such as megatron_rft.objectives.GRPO"
        )
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{OPTION}: {named} does not define {', '.join(missing)}")
    if "__dataclass_fields__" not in vars(found) and inspect.get_annotations(found):
        raise ConfigError(f"{OPTION}: {named} has fields of its own, and needs @dataclass(frozen=True)")
    return found


def _typed(name: str, value: Any, hint: Any) -> Any:
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    try:
        return TypeAdapter(hint, config=config).validate_python(value)
    except ValidationError as error:
        place, problem = explain(error.errors(include_url=False)[0], ("algorithm", name), ())
        raise ConfigError(f"{'.'.join(place)}: {problem}") from None


def _check_needs(recipe: Recipe, objective: PolicyObjective) -> None:
    for name in objective.needs - set(CAN_NEED):
        raise ConfigError(
            f"{OPTION}: {type(objective).__name__}.needs names {name!r}; it can need {', '.join(CAN_NEED)}."
            f"{did_you_mean(name, CAN_NEED)}"
        )
    if ("values" in objective.needs) != (recipe.critic is not None):
        raise ConfigError(
            "critic: the objective needs no values: set it to null"
            if recipe.critic
            else "critic: is missing, and the objective needs values. Give at least critic.lr, e.g. 1e-5"
        )
    if recipe.model.reference and not objective.needs & {"ref_logprobs", "ref_kl", "reference"}:
        raise ConfigError("model.reference does nothing: the objective needs no reference")
