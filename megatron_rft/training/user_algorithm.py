"""Builds a user's algorithm: the class that algorithm.objective names, with its options section."""

import inspect
import typing
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import ValidationError

from megatron_rft.config.algorithms.online import OwnAlgorithm
from megatron_rft.config.messages import explain
from megatron_rft.config.sections import Section
from megatron_rft.objectives.base import Loss, PolicyObjective, Prepared, Setting
from megatron_rft.objectives.surrogates import Clipped
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError, did_you_mean

OPTION = "algorithm.objective"
CAN_NEED = ("old_logprobs", "ref_logprobs", "reference", "values")
RETURNED = {"prepare": Prepared, "loss": Loss, "surrogate": Loss, "clip": Clipped}
OF_ONLINE = ("mini_batch_prompts", "epochs", "old_logprobs")  # options that `OwnAlgorithm` has for every class


def build_objective(section: OwnAlgorithm, setting: Setting) -> PolicyObjective:
    """The user's objective with its options.

    Raises:
        ConfigError: the class or an option cannot be used.
    """
    cls = _class(section.objective)
    options = _options(cls, section)
    try:
        objective = cls(options, setting)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{OPTION}: {cls.__name__} cannot be made with these options: {error}") from None
    _check_needs(objective)
    for name, kind in RETURNED.items():
        if method := getattr(objective, name, None):
            setattr(objective, name, partial(_checked, method, kind))
    return objective


def _checked(method: Callable, kind: type, *given: Any, **named: Any) -> Any:
    if isinstance(returned := method(*given, **named), kind):
        return returned
    fields = ", ".join(inspect.signature(kind).parameters)
    raise user_code.broken(method, returned, f"return {kind.__name__}({fields})")


def _class(named: str) -> type[PolicyObjective]:
    cls = user_code.load(named, OPTION)
    if not (isinstance(cls, type) and issubclass(cls, PolicyObjective)):
        raise ConfigError(
            f"{OPTION}: {named} is no class that derives from megatron_rft.objectives.base.PolicyObjective, or from an "
            "algorithm such as megatron_rft.objectives.grpo.GRPO"
        )
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(f"{OPTION}: {named} does not define {', '.join(missing)}")
    user_code.check_overrides(cls, named, OPTION)
    return cls


def _options(cls: type[PolicyObjective], algorithm: OwnAlgorithm) -> Section:
    """The class's section, with the recipe's options."""
    section = _section(cls)
    known = section.model_fields.keys() - {"name"}
    for name in OF_ONLINE:
        if name not in known and algorithm.differs(name):
            raise ConfigError(f"algorithm.{name} does nothing: {cls.__name__} has no field {name}")
    given: dict[str, Any] = {name: getattr(algorithm, name) for name in OF_ONLINE if name in known}
    given |= algorithm.extra
    try:
        return section(**given)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        place, problem = explain(detail, ("algorithm", *map(str, detail["loc"])), known)
        raise ConfigError(f"{'.'.join(place)}: {problem}") from None


def _section(cls: type[PolicyObjective]) -> type[Section]:
    """The type of `options` that the class or a base class declares."""
    if fields := inspect.get_annotations(cls).keys() - {"options"}:
        raise ConfigError(
            f"{OPTION}: {cls.__name__} has fields of its own ({', '.join(sorted(fields))}). Its options are the fields "
            "of a section, which it names as the type of `options`: docs/own_algorithm.md"
        )
    try:
        section = typing.get_type_hints(cls)["options"]
    except NameError as error:
        raise ConfigError(f"{OPTION}: a type in {cls.__name__} cannot be found: {error}") from None
    if not (isinstance(section, type) and issubclass(section, Section)):
        raise ConfigError(f"{OPTION}: the options of {cls.__name__} must be a class that derives from Section")
    return section


def _check_needs(objective: PolicyObjective) -> None:
    critic = objective.setting.critic is not None
    for name in objective.needs - set(CAN_NEED):
        raise ConfigError(
            f"{OPTION}: {type(objective).__name__}.needs names {name!r}; it can need {', '.join(CAN_NEED)}."
            f"{did_you_mean(name, CAN_NEED)}"
        )
    if ("values" in objective.needs) != critic:
        missing = "critic: is missing, and the objective needs values. Give at least critic.lr, e.g. 1e-5"
        raise ConfigError("critic: the objective needs no values: set it to null" if critic else missing)
    if objective.setting.reference and not objective.needs & {"ref_logprobs", "reference"}:
        raise ConfigError("model.reference does nothing: the objective needs no reference")
