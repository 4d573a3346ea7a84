"""The tool-call verifier: `rlla` gives partial credit; `bfcl` applies the leaderboard's rules; `exact` compares
calls."""

import json

from megatron_rft.records import Score
from megatron_rft.rewards.base import Reward, Row
from megatron_rft.rewards.tools.bfcl import bfcl
from megatron_rft.rewards.tools.calls import BrokenReference, Malformed, tool_calls
from megatron_rft.rewards.tools.exact import exact
from megatron_rft.rewards.tools.rlla import rlla


class ToolReward(Reward):
    def __init__(self, rules: str = "rlla"):
        self.grade, self.maximum = {"rlla": (rlla, 4.0), "bfcl": (bfcl, 1.0), "exact": (exact, 1.0)}[rules]

    def __call__(self, prompts: list[Row], texts: list[str]) -> list[Score]:
        assert len(prompts) == len(texts), f"{len(prompts)} prompts, {len(texts)} texts"
        return [self._score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    def _score(self, prompt: Row, text: str) -> Score:
        try:
            return self.grade(prompt, text)
        except (BrokenReference, RecursionError) as error:
            return Score(0.0, error=f"the reference of problem {prompt.index}: {error}")

    def answer(self, prompt: Row, text: str) -> str | None:
        try:
            calls = tool_calls(text)
            return json.dumps([[call.name, call.arguments] for call in calls], sort_keys=True) if calls else None
        except (Malformed, RecursionError):
            return None
