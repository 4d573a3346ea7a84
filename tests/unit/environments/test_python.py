"""Programs of the policy in the sandbox, and what the policy sees of them."""

import pytest

from megatron_rft.environments.tools import LONGEST, PythonEnvironment


@pytest.fixture(scope="module")
def environment():
    return PythonEnvironment(**PythonEnvironment.shared(timeout_s=2.0, memory_mb=512, without_container=False))


def heard(environment, program: str) -> str:
    (message,) = environment.step(f"I compute.\n```python\n{program}\n```").text
    assert message["role"] == "tool"
    return message["content"]


def test_what_a_program_prints(environment):
    assert heard(environment, "x = 2**40\nprint(x)") == "1099511627776\n"
    assert heard(environment, "print(x)").strip().endswith("NameError: name 'x' is not defined"), "nothing stays"
    assert heard(environment, "print(1\n").startswith("error: ")
    assert "[...]" in (long := heard(environment, "print('a' * 100000)")) and len(long) < LONGEST + 20
    assert heard(environment, "import sys; sys.exit(3)") == "error: exit status 3"
    assert heard(environment, "while True: pass").startswith("error: no result within 2 s")
    assert heard(environment, "open('/etc/passwd')").startswith("error: ")


def test_a_call_runs_too_and_an_answer_ends_the_episode(environment):
    turn = environment.step('<tool_call>\n{"name": "python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>')
    assert turn.text == [{"role": "tool", "name": "python", "content": "42\n"}] and not turn.done
    assert (
        environment.step('<tool_call>{"name": "shell", "arguments": {}}</tool_call>')
        .text[0]["content"]
        .startswith("error: there is no function shell")
    )
    assert environment.step("So the answer is \\boxed{42}.").done
