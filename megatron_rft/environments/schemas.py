"""Describes the functions that an environment offers, for the chat template."""

import importlib.util
import shutil
from collections.abc import Callable
from typing import Any

from megatron_rft.config.environment import AnyEnvironment, Program, Python, Tools
from megatron_rft.environments.tools import OPTION
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError
from megatron_rft.utils.processes import absolute


def schemas(environment: AnyEnvironment) -> tuple[dict[str, Any], ...]:
    """The JSON schemas of the functions that an environment offers.

    Raises:
        ConfigError: a function lacks a type or a description; or what runs programs is not there.
    """
    if isinstance(environment, Program):
        _check_program(environment.command[0])
    if isinstance(environment, Python):
        return (_schema(python, "python"),)
    if isinstance(environment, Tools):
        return tuple(_schema(user_code.load(named, OPTION), named) for named in environment.functions)
    return ()


def _check_program(command: str) -> None:
    if not importlib.util.find_spec("aiohttp"):
        raise ConfigError("environment.kind: aiohttp is not installed: pip install 'megatron-rft[agents]'")
    if shutil.which(absolute(command)) is None:
        raise ConfigError(f"environment.command: there is no program {command} (looked for in PATH)")


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
