"""What a client gets of a turn: its answer, its thought and its calls."""

import pytest

from megatron_rft.environments.messages import Spoken
from megatron_rft.records import Response
from tests.unit.environments.test_template import CHATML
from tools.bench.programs import byte_tokenizer

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
ANALYSIS = "<|channel|>analysis<|message|>to=functions.add {}?<|end|><|start|>assistant"
CALLS = ANALYSIS + ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
PLAIN, THINKS = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("prompt", "text", "content", "thought", "calls"),
    [
        (THINKS, f"I could write {CALL} but", "", f"I could write {CALL} but", 0),
        (THINKS.strip(), f"I could write {CALL} but", "", f"I could write {CALL} but", 0),
        (PLAIN, f"<think>\nI could write {CALL} but", "", f"I could write {CALL} but", 0),
        (THINKS, "It is 1.\n</think>\n\nanswer", "answer", "It is 1.", 0),
        (THINKS, f"It is 1.\n</think>\n\nSo: {CALL}", "So:", "It is 1.", 1),
        (THINKS, "</think>\n\nanswer", "answer", None, 0),
        (f"{THINKS}\n</think>\n\n", f"So: {CALL}", "So:", None, 1),
        (PLAIN, f"So: {CALL}", "So:", None, 1),
        (PLAIN, "\nanswer", "\nanswer", None, 0),
        (PLAIN, f"{ANALYSIS}<|channel|>final<|message|>It is 2.<|return|>", "It is 2.", "to=functions.add {}?", 0),
        (PLAIN, ANALYSIS.partition("<|end|>")[0], "", "to=functions.add {}?", 0),
        (PLAIN, CALLS, None, "to=functions.add {}?", 1),
        # JSON without a tag, or behind a tag that is a special token
        (PLAIN, '{"name": "add", "arguments": {"a": 1}}', None, None, 1),
        (PLAIN, '{"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}', None, None, 1),
        (PLAIN, 'I add: [{"name": "add", "parameters": {"a": 1}}]', "I add:", None, 1),
        (PLAIN, 'So:\n```json\n{"name": "add", "arguments": {"a": 1}}\n```', "So:", None, 1),
    ],
)
def test_an_open_thought_is_no_answer(prompt, text, content, thought, calls):
    tokenizer = byte_tokenizer(CHATML, *(f"<|{name}|>" for name in ("channel", "message", "start", "call", "return")))
    ids, before = (tuple(tokenizer.encode(each, add_special_tokens=False)) for each in (text, prompt))
    sampled = Response(ids, (0.0,) * len(ids), "length", 0)
    message, turn = Spoken(tokenizer, (tokenizer.eos_token_id,)).message(before, sampled, TOOLS, [], "0")
    assert (message["content"], message.get("reasoning_content")) == (content, thought)
    assert len(message.get("tool_calls", ())) == calls and turn is sampled


def test_a_long_text_takes_no_quadratic_time():
    """Channels are looked for only where they are: without that these take minutes."""
    tokenizer = byte_tokenizer(CHATML)
    ids = tuple(tokenizer.encode("word " * 40_000, add_special_tokens=False))
    message, _ = Spoken(tokenizer, ()).message((), Response(ids, (0.0,) * len(ids), "stop", 0), None, [], "0")
    assert message["content"] == "word " * 40_000
