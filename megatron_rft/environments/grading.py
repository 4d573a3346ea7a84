"""The score of a program's episode, by the user's function, in a process of environments."""

import inspect
import json
from pathlib import Path
from typing import Any

from megatron_rft.environments.base import Environment, Message, Turn
from megatron_rft.responses import Prompt, Score
from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError

OPTION = "environment.score"
GIVEN = ("row", "folder", "status", "conversation")


def row_of(prompt: Prompt) -> dict[str, Any]:
    """A problem as a program and its score see it."""
    return {
        **prompt.fields,
        "index": prompt.index,
        "question": prompt.question or prompt.text,
        "answer": prompt.answer,
    }


class ProgramScore(Environment):
    """Its only turn has how the program ended."""

    def __init__(self, grade: Any):
        self.grade = grade

    @staticmethod
    def shared(score: str | None, **_: Any) -> dict[str, Any]:
        if score is None:
            return {"grade": None}
        grade = user_code.load(score, OPTION)
        try:
            inspect.signature(grade).bind(*GIVEN)
        except TypeError:
            raise ConfigError(f"{OPTION}: {score} must be a function ({', '.join(GIVEN)})") from None
        return {"grade": grade}

    def reset(self, prompt: Prompt, seed: int) -> None:
        self.row = row_of(prompt)

    def step(self, text: str) -> Turn:
        self.ended = json.loads(text)
        return Turn(done=True)

    def score(self) -> Score | float | None:
        conversation: list[Message] = self.ended["conversation"]
        return self.grade(self.row, Path(self.ended["folder"]), self.ended["status"], conversation)
