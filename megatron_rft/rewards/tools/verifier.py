"""The tool-call verifier: `exact` compares calls, and `rlla` gives partial credit, as ToolRL's reward (arXiv
2504.13958, section 3.3): format, 0 or 1, plus correctness in [-3, 3],

    6 * (names + keys + values) / (1 + |G| + sum_j |keys(G_j)|) - 3

over the best assignment of predicted to reference calls G: `names` is the overlap of the two collections of names
(intersection over union), `keys` the sum over calls of the overlap of their argument names, `values` the number of
equal arguments. The format is the reference's: <think>, then <tool_call> and/or <response>, as the reference has them,
once each and in this order, with nothing around them. A reference without tags requires none.
*Decision*: where the reference makes no call, correctness is 3 for making none and -3 for making one.
"""

import json
import math
from collections import Counter

from megatron_rft.responses import Prompt, Score
from megatron_rft.rewards.base import Reward, verdict, with_thought, without_thoughts
from megatron_rft.rewards.tools.calls import BrokenReference, Call, Malformed, both_calls, equal, tool_calls

MOST_CALLS = 32  # of a response: more are no answer, and would make the assignment slow
TAGS = ("think", "tool_call", "response")


class ToolReward(Reward):
    def __init__(self, rules: str = "rlla"):
        self.grade, self.maximum = {"rlla": (rlla, 4.0), "exact": (exact, 1.0)}[rules]

    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        return [self._score(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]

    def _score(self, prompt: Prompt, text: str) -> Score:
        try:
            return self.grade(prompt, with_thought(prompt, text))
        except (BrokenReference, RecursionError) as error:
            return Score(0.0, error=f"the reference of problem {prompt.index}: {error}")

    def answer(self, prompt: Prompt, text: str) -> str | None:
        try:
            calls = tool_calls(with_thought(prompt, text))
            return json.dumps([[call.name, call.arguments] for call in calls], sort_keys=True) if calls else None
        except (Malformed, RecursionError):
            return None


def exact(prompt: Prompt, text: str) -> Score:
    """The calls must be the reference's, in any order: 1 or 0, as SDPO grades its tool rows (arXiv 2601.20802)."""
    wanted, left, problem = both_calls(prompt.answer, text)
    if left is None:
        return verdict(False, problem)
    if len(left) != len(wanted):
        return verdict(False, f"{len(left)} calls, expected {len(wanted)}")
    for call in wanted:
        same = [each.name == call.name and equal(call.arguments, each.arguments) for each in left]
        if True not in same:
            return verdict(False, f"no call {call.name} with {call.arguments}")
        left.pop(same.index(True))
    return verdict(True, "all calls right")


def rlla(prompt: Prompt, text: str) -> Score:
    wanted, made, problem = both_calls(prompt.answer, text)
    tags = [tag for tag in TAGS if f"<{tag}>" in (prompt.answer if tag == "think" else without_thoughts(prompt.answer))]
    shape = float(not tags or has_sections(text, tags))
    correctness, why = (-3.0, problem) if made is None else _correctness(wanted, made)
    correct = correctness == 3.0 and made is not None
    reason = f"{'format followed' if shape else 'format not followed'}; {why}"
    return Score(shape + correctness, reason, correct=correct, details={"format": shape, "calls": correctness})


def has_sections(text: str, tags: list[str]) -> bool:
    """<a> ... </a> <b> ... </b>, each once and with content, in this order, with nothing but white space outside."""
    rest = text.strip()
    for tag in tags:
        inside, closed, after = rest.removeprefix(f"<{tag}>").partition(f"</{tag}>")
        if not rest.startswith(f"<{tag}>") or not closed or not inside.strip():
            return False
        if any(f"<{other}>" in inside for other in tags):
            return False
        rest = after.strip()
    return not rest


def _correctness(wanted: list[Call], made: list[Call]) -> tuple[float, str]:
    if not wanted:
        return (3.0, "rightly no call") if not made else (-3.0, f"no call was wanted, {made[0].name} is called")
    if not made:
        return -3.0, f"{wanted[0].name} is not called"
    if len(made) > MOST_CALLS:
        return -3.0, f"{len(made)} calls"
    best = 1 + len(wanted) + sum(len(call.arguments) for call in wanted)
    got = _overlap([call.name for call in wanted], [call.name for call in made])
    got += assign([[_credit(call, other) for other in made] for call in wanted])
    return 6.0 * got / best - 3.0, "all calls right" if got == best else _first_difference(wanted, made)


def _overlap(ours: list[str], theirs: list[str]) -> float:
    """Return the intersection over union of two multisets."""
    a, b = Counter(ours), Counter(theirs)
    union = (a | b).total()
    return (a & b).total() / union if union else 1.0


def _credit(wanted: Call, made: Call) -> float:
    """Return the overlap of the argument names plus the number of equal arguments; 0 for another function."""
    if wanted.name != made.name:
        return 0.0
    same = sum(key in made.arguments and equal(value, made.arguments[key]) for key, value in wanted.arguments.items())
    return _overlap(list(wanted.arguments), list(made.arguments)) + same


def assign(credits: list[list[float]]) -> float:
    """Return the largest sum of a table's entries of which no two share a row or a column."""
    import networkx  # the import takes a second

    graph = networkx.Graph()
    for row, entries in enumerate(credits):
        graph.add_weighted_edges_from((row, ~column, credit) for column, credit in enumerate(entries))
    return math.fsum(graph.edges[pair]["weight"] for pair in networkx.max_weight_matching(graph))


def _first_difference(wanted: list[Call], made: list[Call]) -> str:
    by_name = {call.name: call for call in made}
    for call in wanted:
        other = by_name.get(call.name)
        if other is None:
            return f"{call.name} is not called"
        for key, value in call.arguments.items():
            if key not in other.arguments:
                return f"{call.name}: the argument {key} is missing"
            if not equal(value, other.arguments[key]):
                return f"{call.name}: {key} is {other.arguments[key]!r}, expected {value!r}"
        if extra := other.arguments.keys() - call.arguments.keys():
            return f"{call.name}: unknown argument {min(extra)}"
    return f"{len(made)} calls, expected {len(wanted)}"
