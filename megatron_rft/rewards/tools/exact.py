"""Tool calls that must be the reference's, in any order: 1 or 0, as SDPO grades its tool rows (arXiv 2601.20802)."""

from megatron_rft.records import Score
from megatron_rft.rewards.base import Row
from megatron_rft.rewards.tools.calls import Call, both_calls, equal


def exact(prompt: Row, text: str) -> Score:
    wanted, left, problem = both_calls(prompt.answer, text)
    if left is None:
        return Score(0.0, problem, correct=False)
    if len(left) != len(wanted):
        return Score(0.0, f"{len(left)} calls, expected {len(wanted)}", correct=False)
    for call in wanted:
        found = next((k for k, made in enumerate(left) if _same(call, made)), None)
        if found is None:
            return Score(0.0, f"no call {call.name} with {call.arguments}", correct=False)
        left.pop(found)
    return Score(1.0, "all calls right", correct=True)


def _same(call: Call, made: Call) -> bool:
    return made.name == call.name and equal(call.arguments, made.arguments)
