"""An environment that runs the policy's programs in the sandbox: the last fenced block of Python of a turn, or its call
of the function `python`. What the program prints is a message of the role tool. Each program runs in its own cell, so
nothing stays from one turn to the next. A turn without a program ends the episode: it is the answer.
"""

from typing import Any

from megatron_rft.environments.base import Environment, Turn
from megatron_rft.environments.tools import answer
from megatron_rft.rewards.code import Interpreter, last_program
from megatron_rft.rewards.tools.calls import Malformed, tool_calls

LONGEST = 4000  # characters of an output that the policy sees


class PythonEnvironment(Environment):
    def __init__(self, run: Interpreter):
        self.run = run

    @staticmethod
    def shared(**options: Any) -> dict[str, Any]:
        """The arguments of each environment, made once for the process."""
        return {"run": Interpreter(**options)}

    def step(self, text: str) -> Turn:
        try:
            source = last_program(text) or called(text)
        except (Malformed, RecursionError) as error:
            return Turn([answer(f"error: {error}")])
        return Turn([answer(shortened(self.run(source)))]) if source is not None else Turn(done=True)


def called(text: str) -> str | None:
    """The program in a call of `python`. Raises Malformed for another call."""
    calls = tool_calls(text)
    if not calls:
        return None
    code = calls[-1].arguments.get("code")
    if calls[-1].name != "python" or not isinstance(code, str):
        raise Malformed(f"there is no function {calls[-1].name} with these arguments: call python with its code")
    return code


def shortened(output: str) -> str:
    half = LONGEST // 2
    return output if len(output) <= LONGEST else f"{output[:half]}\n[...]\n{output[-half:]}"
