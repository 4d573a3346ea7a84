import os
import sys

import pytest

from megatron_rft.utils import user_code
from megatron_rft.utils.errors import ConfigError


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    return tmp_path


def test_of_a_file_and_of_a_module(folder):
    (folder / "sub").mkdir()
    (folder / "sub/mine_of_test.py").write_text("class Thing: pass\n")
    (folder / "module_of_test.py").write_text("value = 3\n")
    assert user_code.load("sub/mine_of_test.py:Thing", "x").__name__ == "Thing"
    assert user_code.load("sub/mine_of_test.py:Thing", "x") is user_code.load("sub/mine_of_test.py:Thing", "x")
    assert user_code.load("module_of_test:value", "x") == 3


def test_a_file_changed_within_the_second_is_read_again(folder):
    code = folder / "changed_in_test.py"
    for value in (3, 4):
        code.write_text(f"value = {value}\n")
        os.utime(code, (1e9, 1e9))  # bytecode knows its source by second and size
        sys.modules.pop(f"user:{code}", None)
        assert user_code.load("changed_in_test.py:value", "x") == value


def test_the_file_of_code(folder):
    (folder / "other_module_of_test.py").write_text("value = 3\n")
    assert user_code.source("other_module_of_test:value") == folder / "other_module_of_test.py"
    assert str(user_code.source("sub/mine.py:Thing")) == "sub/mine.py"
    assert user_code.source("sys:path") is None and user_code.source("no.where:value") is None


@pytest.mark.parametrize(
    ("named", "problem"),
    [
        ("Thing", "names no code: write my_file.py:Name"),
        ("a.py:", "names no code"),
        ("missing.py:Thing", "there is no file missing.py"),
        ("missing_module_of_test:Thing", "there is no module missing_module_of_test"),
        ("broken.py:Thing", "importing broken.py failed: NameError: name 'undefined' is not defined"),
        ("wants.py:Thing", "importing wants.py failed: ModuleNotFoundError: No module named 'nowhere_of_test'"),
        ("sub/friend.py:Thing", ", line 1): sub is not searched, add it to PYTHONPATH"),
        ("whole.py:Thign", "whole.py has no Thign. Did you mean 'Thing'?"),
    ],
)
def test_what_is_wrong_is_said(folder, named, problem):
    (folder / "broken.py").write_text("a = 1\nundefined\n")
    (folder / "wants.py").write_text("import nowhere_of_test\n")
    (folder / "whole.py").write_text("class Thing: pass\n")
    (folder / "sub").mkdir()
    (folder / "sub/friend.py").write_text("from beside_of_test import Thing\n")
    (folder / "sub/beside_of_test.py").write_text("class Thing: pass\n")
    with pytest.raises(ConfigError, match="^algorithm.objective: ") as error:
        user_code.load(named, "algorithm.objective")
    assert problem in str(error.value)
    if "broken" in named:
        assert "broken.py, line 2)" in str(error.value)
