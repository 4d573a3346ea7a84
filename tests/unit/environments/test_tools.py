"""Functions as tools: their schemas, the calls that run them, and what the policy sees of a wrong call."""

import json

import pytest

from megatron_rft.commands.environment import invented
from megatron_rft.config.environment import Tools
from megatron_rft.environments import Prompt
from megatron_rft.environments.tools import ToolEnvironment, schemas
from megatron_rft.utils.errors import ConfigError

CODE = '''
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def look(name: str) -> dict:
    """Looks a name up.

    Args:
        name: The name.
    """
    return {"name": name, "born": 1852}


async def waits(a: int) -> int:
    """Waits.

    Args:
        a: A number.
    """


def either(a: int | float, b: list[int] | None = None) -> float:
    """Takes numbers.

    Args:
        a: A number of one of two types.
        b: Numbers.
    """


def untyped(a):
    """Does nothing."""
'''


@pytest.fixture
def named(tmp_path):
    (tmp_path / "calc.py").write_text(CODE)
    return lambda *names: [f"{tmp_path}/calc.py:{name}" for name in names]


def test_schemas(named):
    add, look = schemas(Tools(kind="tools", functions=named("add", "look")))
    assert add["function"]["name"] == "add" and look["function"]["parameters"]["required"] == ["name"]
    assert add["function"]["parameters"]["properties"]["a"] == {"type": "integer", "description": "The first number."}
    with pytest.raises(ConfigError, match=r"environment.functions: .*untyped cannot be described"):
        schemas(Tools(kind="tools", functions=named("untyped")))
    with pytest.raises(ConfigError, match=r"environment.functions: .*waits is async, .*asyncio.run"):
        schemas(Tools(kind="tools", functions=named("waits")))


def test_made_up_arguments_have_one_of_the_types(named):
    turns = invented(Tools(kind="tools", functions=named("either")), Prompt(0, (), "", answer="5"))
    assert json.loads(turns[0].removesuffix("</tool_call>").removeprefix("<tool_call>")) == {
        "name": "either",
        "arguments": {"a": 7, "b": [1, 2]},
    }


def test_calls(named):
    environment = ToolEnvironment(**ToolEnvironment.shared(named("add", "look")))

    def heard(text: str) -> list[str]:
        turn = environment.step(text)
        assert not turn.done and all(message["role"] == "tool" for message in turn.text)
        return [message["content"] for message in turn.text]

    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    assert heard("I add. " + call % ("add", '{"a": 17, "b": 25}')) == ["42"]
    assert heard(call % ("look", '{"name": "X"}') + call % ("add", '{"a": 1, "b": -1}')) == [
        '{"name": "X", "born": 1852}',
        "0",
    ]
    assert heard(call % ("sub", "{}")) == ["error: there is no function sub. There are: add, look"]
    assert heard(call % ("add", '{"a": 1}'))[0].startswith("error: TypeError: add() missing 1 required")
    assert heard("<tool_call>{broken")[0].startswith("error: ")
    for half in (call % ("look", '{"name": "\\ud83d"}'), call % ("\\ud83d", "{}"), '[look(name="\\ud83d")]'):
        assert heard(half)[0].startswith("error: "), "the policy's fault, which ends no run"
    assert heard(call % ("add", '{"a": 1, "b": 1}') * 17) == ["error: 17 calls, and 16 are allowed in a turn"]
    assert environment.step("The answer is 42.").done
    assert environment.score() is None, "the recipe's reward judges the answer"
