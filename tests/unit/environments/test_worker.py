"""A user's class is checked before a run starts: the message names the class, the method and what it must take."""

import pytest

from megatron_rft.environments import Environment
from megatron_rft.environments.worker import maker
from megatron_rft.utils.errors import ConfigError

CODE = """
from megatron_rft.environments import Environment

class Good(Environment):
    def step(self, text, *, shown=True): ...

class Arguments(Good):
    def __init__(self, size): ...

class Reset(Good):
    def reset(self, prompt): ...

class Step(Good):
    def step(self): ...

class Silent(Environment):
    def reset(self, prompt, seed): ...

class Scored(Good):
    def scores(self): ...

class Other: ...

def function(): ...
"""
REFUSED = {
    "Arguments": r"guess.py:Arguments must have __init__\(self\), not __init__\(self, size\)",
    "Reset": r"guess.py:Reset must have reset\(self, prompt, seed\), not reset\(self, prompt\)",
    "Step": r"guess.py:Step must have step\(self, text\), not step\(self\)",
    "Silent": "guess.py:Silent has no method `step`, which answers a turn",
    "Scored": "nothing calls Scored.scores. Did you mean 'score'?",
    "Other": "guess.py:Other is no class of megatron_rft.environments.Environment",
    "function": "guess.py:function is no class of megatron_rft.environments.Environment",
    "Goad": "guess.py has no Goad. Did you mean 'Good'",
}


@pytest.fixture
def named(tmp_path, monkeypatch):
    (tmp_path / "guess.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return lambda name: maker(kind="own", episode=f"guess.py:{name}")


def test_a_class_that_fits(named):
    assert isinstance(named("Good")(), Environment)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(named, name):
    with pytest.raises(ConfigError, match=f"environment.episode: {REFUSED[name]}"):
        named(name)
