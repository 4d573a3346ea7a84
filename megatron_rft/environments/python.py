"""An environment that runs the policy's programs in the sandbox: a turn's last fenced block of Python, or its calls of
the function `python`. What a program prints is a message of the role tool. Each program runs in its own cell, so
nothing stays from one program to the next. A turn without a program ends the episode: it is the answer.
"""

from typing import Any

from megatron_rft.environments.base import Turn
from megatron_rft.environments.tools import ToolEnvironment, answer
from megatron_rft.rewards.code import Interpreter, last_program
from megatron_rft.rewards.tools.calls import Call

LONGEST = 4000  # characters of an output that the policy sees


class PythonEnvironment(ToolEnvironment):
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
