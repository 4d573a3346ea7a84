"""Describes the functions that an environment offers, for the chat template."""

from collections.abc import Callable
from typing import Any

from megatron_rft.config.environment import AnyEnvironment, Python, Tools
from megatron_rft.environments.tools import OPTION
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError


def schemas(environment: AnyEnvironment) -> tuple[dict[str, Any], ...]:
    """The JSON schemas of the functions that an environment offers.

    Raises:
        ConfigError: a function lacks a type or a description.
    """
    if isinstance(environment, Python):
        return (_schema(python, "python"),)
    if isinstance(environment, Tools):
        return tuple(_schema(user_code.load(named, OPTION), named) for named in environment.functions)
    return ()


def python(code: str):
    """Runs a Python program. Returns what it prints.

    Args:
        code: The program.
    """


def _schema(function: Callable[..., Any], named: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"{OPTION}: {named} cannot be described to the policy: {error}. It needs a type for each argument and a "
            'docstring with a line "name: description" for each under "Args:"'
        ) from None
