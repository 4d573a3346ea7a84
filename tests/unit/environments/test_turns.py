"""The tree of a program's turns: what continues what, and each sampled token in one turn of one segment."""

import copy
import json

import pytest

from megatron_rft.environments.turns import PolicyTurn, Tree, named, plain
from megatron_rft.responses import Response

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str, **more) -> dict:
    return {"role": "assistant", "content": text} | more


class Made:
    """A tree that is asked; each message has one token, and each turn two new ones."""

    def __init__(self):
        self.tree, self.next = Tree(), 100

    def ask(self, messages: list[dict], answer: dict, tools=None) -> PolicyTurn:
        messages = [plain(message) for message in messages]
        parent, new = self.tree.place(messages, tools)
        sampled = Response((self.next, self.next + 1), (-0.1 * self.next, -0.2), "stop", len(self.tree.turns))
        self.next += 2
        turn = PolicyTurn(
            parent,
            tuple(range(1, len(new) + 1)),
            "/".join(m["content"] for m in new) if parent else "",
            sampled,
            self.next,
        )
        self.tree.add(turn, messages, answer, tools)
        return turn


def trained(response: Response) -> list[int]:
    """The tokens of all turns, which must be those that were sampled, once."""
    parts = (*response.segments, response)
    assert all(len(each.token_ids) == len(each.logprobs) for each in parts)
    return [id for each in parts for first, end, _ in each.turns for id in each.token_ids[first:end]]


def test_a_conversation_is_one_sequence():
    made, messages = Made(), [user("a")]
    for number in range(3):
        turn = made.ask(messages, said(str(number)))
        messages += [said(str(number)), user(f"and {number}")]
    response = made.tree.response(own=(1,))
    assert response.prompt_ids is None and not response.segments and response.order == ()
    assert response.token_ids == (100, 101, 1, 102, 103, 1, 104, 105) and response.said == ("and 0", "and 1")
    assert response.turns == ((0, 2, 0.0), (3, 5, 0.0), (6, 8, 0.0)) and response.logprobs[2] == 0.0
    assert response.weight_version == 0 and turn.tokens == (1, *response.token_ids)
    assert made.tree.response(own=(7,)).prompt_ids == (1,)


@pytest.mark.parametrize(
    ("changed", "continues"),
    [
        (said(" x\n", tool_calls=[CALL | {"index": 0}], refusal=None, annotations=[], reasoning_content="hm"), True),
        (said("x", tool_calls=[CALL | {"id": "other"}]), True),
        (said([{"type": "text", "text": "x"}], tool_calls=[CALL]), True),
        (said("x", tool_calls=[CALL | {"function": {"name": "add", "arguments": '{"b":2,"a":1}'}}]), True),
        (said("y", tool_calls=[CALL]), False),
        (said("x"), False),
        (said("x", tool_calls=[CALL | {"function": {"name": "add", "arguments": '{"b":3,"a":1}'}}]), False),
    ],
)
def test_what_clients_change_does_not_count(changed, continues):
    made = Made()
    first = made.ask([user("a")], said("x", tool_calls=[CALL]), TOOLS)
    result = {"role": "tool", "tool_call_id": "1", "content": "3", "name": "add"}
    turn = made.ask([user("a"), changed, result], said("b"), copy.deepcopy(TOOLS))
    assert turn.parent is (first if continues else None)


def test_another_history_or_other_tools_begin_a_segment():
    made, start = Made(), [user("a")]
    first = made.ask(start, said("1"))
    second = made.ask([*start, said("1"), user("b")], said("2"))
    assert second.parent is first
    assert made.ask([user("summary")], said("3")).parent is None
    assert made.ask([user("A"), said("1"), user("b")], said("4")).parent is None
    assert made.ask([*start, said("1"), user("b")], said("5"), TOOLS).parent is None
    assert made.ask([*start, said("1")], said("6")).parent is None, "nothing new behind it"
    branch = made.ask([*start, said("1"), user("other")], said("7"))
    assert branch.parent is first
    response = made.tree.response(own=(1,))
    assert sorted(trained(response)) == [*range(100, 114)] and len(response.segments) == 5
    assert response.prompt_ids == (*first.tokens, 1) and response.token_ids == branch.sampled.token_ids
    assert [each.order for each in response.segments] == [(102, 104), (106,), (108,), (110,), (112,)]
    whole = response.joined()
    assert len(whole.turns) == 7, "what trains on it accepts the order"


def test_several_answers_to_one_request():
    made = Made()
    turns = [made.ask([user("a")], said(text)) for text in "xyz"]
    follow = made.ask([user("a"), said("y"), user("b")], said("w"))
    assert follow.parent is turns[1]
    response = made.tree.response(own=(1,))
    assert sorted(trained(response)) == [*range(100, 108)] and len(response.segments) == 2
    assert response.turns == ((0, 2, 0.0), (3, 5, 0.0))


def test_a_state_that_the_system_tells_at_the_end_costs_no_segment():
    """It stands in its place in the tokens; the next request may have it or not."""
    for keeps in (True, False):
        made, messages = Made(), [{"role": "system", "content": "You help."}, user("a")]
        turns = []
        for number in range(3):
            state = {"role": "system", "content": f"{number} tokens left"}
            turns.append(made.ask([*messages, state], said(str(number))))
            messages += [*([state] if keeps else []), said(str(number)), user("go on")]
        assert [turn.parent for turn in turns] == [None, *turns[:2]]
    assert made.ask([user("a"), {"role": "system", "content": "new"}, said("0"), user("b")], said("x")).parent is None


def test_results_have_the_names_of_their_calls():
    call = {"id": "1", "function": {"name": "add", "arguments": "{}"}}
    results = [{"role": "tool", "content": "2"} | more for more in ({"tool_call_id": "1"}, {"tool_call_id": "2"}, {})]
    said = [{"role": "assistant", "tool_calls": [call, call | {"id": None}]}, *results, results[0] | {"name": "own"}]
    found = named([plain(message) for message in said])
    assert [message.get("name") for message in found] == [None, "add", None, None, "own"]


def test_only_text_and_images_are_taken():
    for content in ([{"type": "input_audio", "input_audio": {}}], {"a": 1}, 7):
        with pytest.raises(ValueError, match="is not supported: only text and images"):
            plain({"role": "user", "content": content})
    for url in ("/etc/passwd", "http://host/a.png", "iVBORw0K"):
        for part in ({"type": "image_url", "image_url": {"url": url}}, {"type": "image", "image": url}):
            with pytest.raises(ValueError, match="an image of a request is a data URL"):
                plain({"role": "user", "content": [part]})
    assert json.loads(json.dumps(plain({"role": "developer", "content": None}))) == {"role": "system", "content": ""}
