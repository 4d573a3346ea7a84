"""Environments of functions: the policy's turn calls some, and their results are messages of the role tool.

A turn without a call ends the episode: it is the answer. What a wrong call raises is shown to the policy, as is a call
that cannot be read. The functions are described for the chat template.
"""

import importlib.util
import inspect
import json
import shutil
from collections.abc import Callable
from typing import Any

from megatron_rft.config.environment import AnyEnvironment, Program, Python, Tools
from megatron_rft.environments.base import Environment, Message, Turn
from megatron_rft.rewards.code import Interpreter, last_program
from megatron_rft.rewards.tools.calls import Call, Malformed, tool_calls
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError
from megatron_rft.utils.processes import absolute

OPTION = "environment.functions"
MOST_CALLS = 16  # of one turn
LONGEST = 4000  # characters of a program's output that the policy sees


class ToolEnvironment(Environment):
    def __init__(self, functions: dict[str, Callable[..., Any]]):
        self.functions = functions

    @staticmethod
    def shared(functions: list[str]) -> dict[str, Any]:
        """The arguments of each environment, made once for the process."""
        return {"functions": {tool.__name__: tool for tool in (user_code.load(name, OPTION) for name in functions)}}

    def step(self, text: str) -> Turn:
        try:
            calls = tool_calls(text)
        except (Malformed, RecursionError) as error:
            return Turn([answer(f"error: {error}")])
        if not calls:
            return Turn(done=True)
        if len(calls) > MOST_CALLS:
            return Turn([answer(f"error: {len(calls)} calls, and {MOST_CALLS} are allowed in a turn")])
        return Turn([answer(self.result(call), call.name) for call in calls])

    def result(self, call: Call) -> str:
        if call.name not in self.functions:
            return f"error: there is no function {call.name}. There are: {', '.join(self.functions)}"
        try:
            return as_text(self.functions[call.name](**call.arguments))
        except Exception as error:  # of the policy's arguments
            return f"error: {type(error).__name__}: {error}"


class PythonEnvironment(ToolEnvironment):
    """Runs the policy's programs in the sandbox: a turn's last fenced block of Python, or its calls of the function
    `python`. What a program prints is a message of the role tool. Each program runs in its own cell, so nothing stays
    from one program to the next. A turn without a program ends the episode: it is the answer."""

    def __init__(self, run: Interpreter):
        self.run = run

    @staticmethod
    def shared(**options: Any) -> dict[str, Any]:
        return {"run": Interpreter(**options)}

    def step(self, text: str) -> Turn:
        program = last_program(text)
        return super().step(text) if program is None else Turn([answer(self.printed(program), "python")])

    def result(self, call: Call) -> str:
        code = call.arguments.get("code")
        if call.name == "python" and isinstance(code, str):
            return self.printed(code)
        return f"error: there is no function {call.name} with these arguments: call python with its code"

    def printed(self, program: str) -> str:
        output, half = self.run(program), LONGEST // 2
        return output if len(output) <= LONGEST else f"{output[:half]}\n[...]\n{output[-half:]}"


def answer(text: str, name: str = "tool") -> Message:
    return {"role": "tool", "name": name, "content": text}


def as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def schemas(environment: AnyEnvironment) -> tuple[dict[str, Any], ...]:
    """The JSON schemas of the functions that an environment offers.

    Raises:
        ConfigError: a function lacks a type or a description; or what runs programs is not there.
    """
    if isinstance(environment, Program):
        if not importlib.util.find_spec("aiohttp"):
            raise ConfigError("environment.kind: aiohttp is not installed: pip install 'megatron-rft[agents]'")
        if shutil.which(absolute(program := environment.command[0])) is None:
            raise ConfigError(f"environment.command: there is no program {program} to execute (looked for in PATH)")
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

    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{OPTION}: {named} is async, and calls are not awaited: use asyncio.run in a plain function")
    try:
        return get_json_schema(function)
    except Exception as error:
        raise ConfigError(
            f"{OPTION}: {named} cannot be described to the policy: {error}. It needs a type for each argument and a "
            'docstring with a line "name: description" for each under "Args:"'
        ) from None
