"""BFCL's tasks of several turns, on the backends of bfcl-eval: a file system, a travel agency, a car ...

The policy calls functions until it answers without a call; then comes the user's next message. As in BFCL's checker,
after each of the user's turns the backends must be as after the reference's calls, and the results of these calls must
be among the policy's so far. An episode ends at the first turn where it is not so. Calls are data, never run as source.
"""

import ast
import copy
import importlib
import inspect
import json
from collections import Counter
from typing import Any

from megatron_rft.environments.base import Turn
from megatron_rft.environments.tools import ToolEnvironment
from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.tools.calls import Call


class World(ToolEnvironment):
    """The backends of a row, with the results of all calls."""

    def __init__(self, modules: dict[str, str], fields: dict[str, Any]):
        self.backends: dict[str, Any] = {}
        for name in fields["involved_classes"]:
            self.backends[name] = backend = getattr(importlib.import_module(modules[name]), name)()
            if hasattr(backend, "_load_scenario"):  # MathAPI has no state
                config = copy.deepcopy(fields.get("initial_config", {}).get(name, {}))
                backend._load_scenario(config, long_context="long_context" in fields["id"])
        left_out = fields.get("excluded_function", [])
        methods = [each for made in self.backends.values() for each in inspect.getmembers(made, inspect.ismethod)]
        super().__init__({name: method for name, method in methods if name[0] != "_" and name not in left_out})
        self.results: list[str] = []

    def result(self, call: Call) -> str:
        self.results.append(super().result(call))
        return self.results[-1]

    def reference(self, source: str) -> Call:
        """A call of the reference, name(1, b=2): literals only."""
        node = ast.parse(source.strip(), mode="eval").body
        values = [ast.literal_eval(each) for each in node.args]
        named = {each.arg: ast.literal_eval(each.value) for each in node.keywords}
        bound = inspect.signature(self.functions[node.func.id]).bind(*values, **named)
        return Call(node.func.id, dict(bound.arguments))

    def differs(self, other: "World") -> str | None:
        """The name of a backend that is not as the other's."""
        return next((name for name, made in self.backends.items() if state(made) != state(other.backends[name])), None)


def state(backend: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(backend).items() if name[0] != "_"}


class BfclEnvironment(ToolEnvironment):
    def __init__(self, modules: dict[str, str]):
        self.modules = modules

    @staticmethod
    def shared() -> dict[str, Any]:
        """The arguments of each environment: the module of each backend."""
        from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

        return {"modules": CLASS_FILE_PATH_MAPPING}

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.own, self.right = (World(self.modules, prompt.fields) for _ in range(2))
        self.later, self.references = list(prompt.fields.get("later", [])), json.loads(prompt.answer)
        self.turns, self.wrong, self.heard = 0, "", 0  # heard: the calls of earlier turns of the user

    def step(self, text: str) -> Turn:
        turn = self.own.step(text)
        if not turn.done:
            return turn
        self.wrong = self._checked(self.references[self.turns])
        self.turns += 1
        if self.wrong or not self.later:
            return Turn(done=True)
        return Turn(self.later.pop(0))

    def _checked(self, reference: list[str]) -> str:
        """What is wrong after the user's turn; nothing is asked of a turn without a call in the reference."""
        before = len(self.right.results)
        for source in reference:
            self.right.result(self.right.reference(source))
        if reference and (name := self.own.differs(self.right)):
            return f"the user's turn {self.turns + 1}: {name} is not as after the right calls"
        missing = Counter(self.right.results[before:]) - Counter(self.own.results)
        if missing or (reference and len(self.own.results) == self.heard):
            return f"the user's turn {self.turns + 1}: a needed call was not made"
        self.heard = len(self.own.results)
        return ""

    def score(self) -> Score:
        finished = self.turns == len(self.references)
        return Score(float(finished and not self.wrong), reason=self.wrong or ("" if finished else "not finished"))
