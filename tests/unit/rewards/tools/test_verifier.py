import itertools
import json
import random
import time

import pytest

from megatron_rft.records import Prompt
from megatron_rft.rewards.tools.calls import Call, Malformed, tool_calls
from megatron_rft.rewards.tools.verifier import ToolReward, assign

F = Call("f", {"a": 1})


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', [F]),
        ('<tool_call>\n{"name": "f", "parameters": {"a": 1}}\n{"name": "g", "parameters": {}}\n</tool_call>',
         [F, Call("g", {})]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and <tool_call>{"name": "g"}</tool_call>',
         [F, Call("g", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [F]),
        ('[{"name": "f", "arguments": {"a": 1}}]', [F]),
        ('```json\n[{"f": {"a": 1}}]\n```', [F]),
        ("[f(a=1), g.h(b='x', c=[1.5, None], d=UP)]", [F, Call("g.h", {"b": "x", "c": [1.5, None], "d": "UP"})]),
        ("f(a=1)", [F]),
        ("<think>f(a=2)</think>\nf(a=1)", [F]),
        ('{"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]}', [F]),
        ('{"content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}', [F]),
        ('[{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]', [F]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}<|eom_id|>', [F]),
        ("<|python_tag|>f(a=1)", [F]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', [F, Call("g", {})]),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]</s>', [F]),
        ('Let me see.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [F, Call("g", {})]),
        ('<function=f>{"a": 1}</function>', [F]),
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", [F]),
        ('I do: ```[f(a=1)]```', [F]),
        ('I look it up.\n\n{"name": "f", "arguments": {"a": 1}}', [F]),
        ("I look it up: [f(a=1)]", [F]),
        ("I look it up.\nf(a=1)", [F]),
        ("One could call f(a=1), but it is not needed.", []),
        ("The list is:\n[1, 2] and no more.", []),
        ('<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>', [F]),
        ('<functioncall> {"name": "f", "arguments": {"a": 1}} </functioncall>', [F]),
        ("<tool_call>{'name': 'f', 'arguments': {'a': 1}}</tool_call>", [F]),
        ("<|python_start|>[f(a=1), g()]<|python_end|>", [F, Call("g", {})]),
        ('<function_calls>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n</function_calls>', [F]),
        ('<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>', [F]),
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', [F]),
        ('<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', [F]),
        ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [F]),
        ('{"function": "f", "arguments": {"a": 1}}', [F]),
        ('{"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}}', [F]),
        ('Action:\n```json\n{"action": "f", "action_input": {"a": 1}}\n```', [F]),
        ('Let me look it up. {"name": "f", "arguments": {"a": 1}}', [F]),
        ('I call it: {"name": "f", "arguments": {"a": 1}}.', [F]),
        ('{"name": "f", "arguments": {"a": 1}}\n\nThis looks it up.', [F]),
        ("f(a=1)\ng()", [F, Call("g", {})]),
        ("result = f(a=1)", [F]),
        ('<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
         "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜>", [F, Call("g", {})]),
        ('<tool_call>\n```json\n{"name": "f", "arguments": {"a": 1}}\n```\n</tool_call>', [F]),
        ("```tool_code\nf(a=1)\n```", [F]),
        ("```python\nprint(f(a=1))\n```", []),  # a program
        ('<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="false">1'
         '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', [F]),
        ('<｜DSML｜function_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1'
         "</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>", [Call("f", {"a": "1"})]),
        ("I cannot do that.", []),
        ("<think>I might call\nf(a=1)", []),  # a thought that does not end
        ("[1, 2]", []),  # JSON, and no call
        ('{"name": 3}', []),
        ('{"a": 1, "b": 2}', []),
        ('{"tool_calls": []}', []),
        ("[" * 5000, []),
        ("", []),
        ("[]", []),
    ],
)  # fmt: skip
def test_the_forms_of_calls(text, calls):
    assert tool_calls(text) == calls


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>{",
        "<tool_call>{'name': 'f'</tool_call>",
        "<tool_call>[1, 2]</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>f</tool_call>",
        "[f(1)]",
        "f('x')",
        "f(a=1",
        "{'name': 'f', 'arguments': {'a': 1",
        '<invoke name="f"><parameter name="a">1',
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</tool_call>",
        "to=functions.f <|message|>{",
        "<|python_tag|>",
        "<tool_call>" + "[" * 30000 + "</tool_call>",
        '{"name": "f", "arguments": {"a": 1}}</tool_call',
        '<tool_call {"name": "f", "arguments": {"a": 1}}>',
        '<tool_calls>[{"name": "f", "arguments": {"a": 1}]',
        "<|python_tag|>import os",
        "<tool_call>```json\n{\n```</tool_call>",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
        '<｜DSML｜function_calls><｜DSML｜invoke name="f">',
        "[TOOL_CALLS] f",
        "<function=f>{",
        'I call it: {"name": "f", "arguments": {"a": 1',
        '<tool_call>{"name": "f", "arguments": {"a": ["half \\ud83d"]}}</tool_call>',
    ],
)
def test_what_cannot_be_read(text):
    with pytest.raises(Malformed):
        tool_calls(text)


def test_a_long_chain_of_names_takes_no_quadratic_time():
    start = time.process_time()
    assert tool_calls("a." * 30_000) == []
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("One could call `f(a=1)`, but it is not needed.", [F]),
        ("Sure: `[f(a=1)]` or so.", [F]),
        ("[] would do, or `f(a=1)` and then `g(b=2)`.", [F, Call("g", {"b": 2})]),
        ("```f(a=1)``` would do, but ```none``` is better.", [F]),
        ("`f(a=2)` does not fit: [f(a=1)]", [F]),
        ("<think>`f(a=2)`</think> None of them.", []),
        ("The function `f()` takes `a = 3` or `[1, 2]`.", []),  # its name, and no calls
        ("One could call f(a=1), but it is not needed.", []),
    ],
)
def test_a_call_between_backticks_is_one_where_no_call_is_wanted(text, calls):
    assert tool_calls(text, quoted=True) == calls
    if calls and "[f(a=1)]" not in text:
        assert tool_calls(text) == []
    for rules, reference in (("exact", "[]"), ("rlla", "None of them.")):
        score = ToolReward(rules)([Prompt(0, (1,), "", reference, {"tools": []})], [text])[0]
        assert (score.correct, score.error) == (not calls, None)


def test_nothing_is_evaluated():
    assert tool_calls("f(a=__import__('os').getcwd())") == [Call("f", {"a": "__import__('os').getcwd()"})]


@pytest.mark.parametrize("value", ["{1, 2}", "b'x'", "1j", "{1: 2, 'a': 3}", "[{(1, 2): 3}]"])
def test_what_json_does_not_have_is_its_own_text(value):
    assert tool_calls(f"f(a={value})") == [Call("f", {"a": value})]
    assert ToolReward().answer(Prompt(0, (1,), "", ""), f"f(a={value})") == json.dumps([["f", {"a": value}]])


def test_calls_in_a_thought_that_the_chat_template_has_opened():
    opened = Prompt(0, (1,), "", "[f(a=1)]", opened=True)
    texts = ["[f(a=1)]", "I call f.</think>[f(a=1)]"]
    assert [score.reward for score in ToolReward("exact")([opened] * 2, texts)] == [0.0, 1.0]
    assert ToolReward().answer(opened, texts[0]) is None


def rlla(reference: str, text: str):
    return ToolReward("rlla")([Prompt(0, (1,), "", reference)], [text])[0]


def tagged(*calls: dict) -> str:
    return "<think> so </think>\n<tool_call>\n" + "\n".join(map(json.dumps, calls)) + "\n</tool_call>"


A = {"name": "f", "parameters": {"a": 1, "b": 2}}
B = {"name": "g", "parameters": {"c": "x"}}
REFERENCE = tagged(A, B)


def test_partial_credit_by_hand():
    """The maximum is 1 name + 2 calls + 3 arguments = 6; correctness is the credit minus 3."""
    assert rlla(REFERENCE, REFERENCE).reward == 4.0 and rlla(REFERENCE, REFERENCE).correct
    assert rlla(REFERENCE, tagged(B, A)).reward == 4.0  # in any order
    wrong = rlla(REFERENCE, tagged({"name": "f", "parameters": {"a": 1, "b": 3}}, B))
    assert wrong.reward == 3.0 and "b is 3, expected 2" in wrong.reason and not wrong.correct
    missing = rlla(REFERENCE, tagged({"name": "f", "parameters": {"a": 1}}, B))
    assert missing.reward == pytest.approx(1 + (1 + 0.5 + 1 + 1 + 1) - 3)  # names, keys of f, a, keys of g, c
    one = rlla(REFERENCE, tagged(A))
    assert one.reward == pytest.approx(1 + (0.5 + 1 + 2) - 3) and "g is not called" in one.reason
    assert rlla(REFERENCE, "<think> so </think>\n<response> no </response>").reward == -3.0
    assert rlla(REFERENCE, "<think> so </think><tool_call>{</tool_call>").reward == 1.0 - 3.0


def test_format_apart_from_correctness():
    score = rlla(REFERENCE, REFERENCE.removeprefix("<think> so </think>"))
    assert score.details == {"format": 0.0, "calls": 3.0} and score.reward == 3.0
    assert rlla(REFERENCE, REFERENCE + " more").details["format"] == 0.0


def test_a_thought_that_names_a_section_asks_for_none():
    reference = REFERENCE.replace("so", "no <response> yet")
    assert rlla(reference, REFERENCE).reward == 4.0


def test_where_no_call_is_wanted():
    reference = "<think> so </think>\n<response> Which city? </response>"
    assert rlla(reference, "<think> a </think> <response> b </response>").reward == 4.0
    assert rlla(reference, tagged(A)).reward == -3.0


def test_repeating_a_call_earns_nothing():
    assert rlla(REFERENCE, tagged(A, B, A)).reward < 4.0
    assert rlla(REFERENCE, tagged(*[A, B] * 20)).reward == 1 - 3.0


def test_assignment_is_the_best():
    numbers = random.Random(0)
    for _ in range(200):
        size = numbers.randrange(1, 6)
        table = [[numbers.choice([0.0, 0.5, 1.0, 2.5, 3.0]) for _ in range(size)] for _ in range(size)]
        best = max(
            sum(table[row][column] for row, column in enumerate(columns))
            for columns in itertools.permutations(range(size))
        )
        assert assign(table) == pytest.approx(best)


def test_exactly_the_calls_of_the_reference():
    reference = json.dumps([A, B])

    def grade(text: str) -> float:
        return ToolReward("exact")([Prompt(0, (1,), "", reference)], [text])[0].reward

    assert grade(tagged(B, A)) == grade("[f(a=1, b=2), g(c='x')]") == 1.0
    for wrong in ("[f(a=1, b=2)]", "[f(a=1, b=2), g(c='X')]", "[f(a=1, b=2, c=3), g(c='x')]", "no", "<tool_call>{"):
        assert grade(wrong) == 0.0


@pytest.mark.parametrize(
    ("reference", "given", "same"),
    [
        ("true", "true", True),
        ("true", "1", False),
        ("1", "1.0", True),
        ("[true]", "[1]", False),
        ("[0, 1]", "[false, true]", False),
        ("[[true], [1]]", "[[true], [1.0]]", True),
        ("[1]", "[1, 1]", False),
        ('{"b": [true]}', '{"b": [true]}', True),
        ('{"b": [true]}', '{"b": [1]}', False),
        ('{"b": 1}', '{"c": 1}', False),
    ],
)
@pytest.mark.parametrize("rules", ["exact", "rlla"])
def test_true_is_not_one_at_any_depth(rules, reference, given, same):
    wanted, made = (f'[{{"name": "f", "arguments": {{"a": {value}}}}}]' for value in (reference, given))
    (score,) = ToolReward(rules)([Prompt(0, (1,), "", wanted)], [made])
    assert score.correct is same and score.error is None


def test_a_broken_reference_is_an_error():
    prompt = Prompt(3, (1,), "", "<tool_call>{</tool_call>")
    assert ToolReward("rlla")([prompt], ["x"])[0].error.startswith("the reference of problem 3")


def test_the_description_says_whether_an_argument_is_a_text():
    for text in (
        "<tool_call>\n<function=f>\n<parameter=a>\n2022\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>2022</arg_value></tool_call>",
    ):
        assert tool_calls(text) == [Call("f", {"a": 2022})]
        assert tool_calls(text, {"f": {"a": {"type": "string"}}}) == [Call("f", {"a": "2022"})]
        row = Prompt(0, (1,), "", '[{"name": "f", "arguments": {"a": "2022"}}]')
        assert ToolReward("exact")([row], [text])[0].reward == 1.0


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "f", "arguments": {"a": 1, "a": 2}}',
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        "<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>",
        '{"arguments": {"a": 1}, "name": "f"} or {"arguments": {"a": 2}, "name": "f"}',
        "[f(a=1, a=2)]",
        "[f(a={'b': 1, 'b': 2})]",
        "{'name': 'f', 'arguments': {'a': 1, 'a': 2}}",
    ],
)
def test_an_argument_twice_or_a_choice_of_calls_is_no_call(text):
    with pytest.raises(Malformed):
        tool_calls(text)
