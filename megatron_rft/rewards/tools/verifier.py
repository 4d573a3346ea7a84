"""The tool-call verifier: `rlla` gives partial credit; `bfcl` applies the leaderboard's rules; `exact` compares
calls."""

import json

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.rewards.tools.bfcl import bfcl
from megatron_rft.rewards.tools.calls import BrokenReference, Malformed, both_calls, equal, tool_calls
from megatron_rft.rewards.tools.rlla import rlla


class ToolReward(Reward):
    def __init__(self, rules: str = "rlla"):
        self.grade, self.maximum = {"rlla": (rlla, 4.0), "bfcl": (bfcl, 1.0), "exact": (exact, 1.0)}[rules]

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        return [self._score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    def _score(self, prompt: Prompt, text: str) -> Score:
        try:
            return self.grade(prompt, text)
        except (BrokenReference, RecursionError) as error:
            return Score(0.0, error=f"the reference of problem {prompt.index}: {error}")

    def answer(self, prompt: Prompt, text: str) -> str | None:
        try:
            calls = tool_calls(text)
            return json.dumps([[call.name, call.arguments] for call in calls], sort_keys=True) if calls else None
        except (Malformed, RecursionError):
            return None


def exact(prompt: Prompt, text: str) -> Score:
    """The calls must be the reference's, in any order: 1 or 0, as SDPO grades its tool rows (arXiv 2601.20802)."""
    wanted, left, problem = both_calls(prompt.answer, text)
    if left is None:
        return Score(0.0, problem, correct=False)
    if len(left) != len(wanted):
        return Score(0.0, f"{len(left)} calls, expected {len(wanted)}", correct=False)
    for call in wanted:
        same = [each.name == call.name and equal(call.arguments, each.arguments) for each in left]
        if True not in same:
            return Score(0.0, f"no call {call.name} with {call.arguments}", correct=False)
        left.pop(same.index(True))
    return Score(1.0, "all calls right", correct=True)
