"""Tool calls that must be the reference's, in any order: 1 or 0, as SDPO grades its tool rows (arXiv 2601.20802)."""

from megatron_rft.records import Score
from megatron_rft.rewards.base import Row
from megatron_rft.rewards.tools.calls import BrokenReference, Call, Malformed, equal, tool_calls, written_as


def exact(prompt: Row, text: str) -> Score:
    try:
        wanted = tool_calls(prompt.answer)
    except Malformed as error:
        raise BrokenReference(str(error)) from None
    try:
        left = tool_calls(text, written_as(wanted), quoted=not wanted)
    except Malformed as error:
        return Score(0.0, str(error), correct=False)
    if len(left) != len(wanted):
        return Score(0.0, f"{len(left)} calls, expected {len(wanted)}", correct=False)
    for call in wanted:
        found = next((k for k, made in enumerate(left) if made.name == call.name and _same(call, made)), None)
        if found is None:
            return Score(0.0, f"no call {call.name} with {call.arguments}", correct=False)
        left.pop(found)
    return Score(1.0, "all calls right", correct=True)


def _same(call: Call, made: Call) -> bool:
    wanted, given = call.arguments, made.arguments
    return wanted.keys() == given.keys() and all(equal(value, given[key]) for key, value in wanted.items())
