"""What tests/run.sh says of the slow tests that it leaves out, and what it runs where not all is installed yet."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests import left_out

ROOT = Path(__file__).resolve().parents[2]


def test_a_changed_objective_names_the_gradient_tests():
    """The tests import the script that imports the objectives."""
    _, run = left_out.lines(["megatron_rft/objectives/grpo.py", "README.md"])
    assert "bash tests/run.sh all " in run and "tests/parity/test_gradient_invariance.py" in run
    assert "tests/slurm" not in run
    assert len(left_out.lines(["README.md"])) == 1
    assert left_out.concerned(["tests/slurm/test_scripts.py"], left_out.slow_files()) == [
        ROOT / "tests/slurm/test_scripts.py"
    ]


def test_each_part_is_what_it_says(tmp_path):
    """With workers both the workers and the first process write what is skipped: a test, and a file. What runs alone
    needs no import of other files."""
    (tmp_path / "test_one.py").write_text(
        "import pytest\ndef test_a(): pytest.skip('no Slurm here')\ndef test_b(): pass\n"
        "@pytest.mark.slow\ndef test_c(): pass\n@pytest.mark.slow\n@pytest.mark.alone\ndef test_d(): pass\n"
    )
    skip = "import pytest\npytest.skip('no mkdocs', allow_module_level=True)\n"
    (tmp_path / "test_two.py").write_text(skip)
    hooks = "pytest_collection_modifyitems, pytest_collectreport, pytest_ignore_collect, pytest_runtest_logreport"
    (tmp_path / "conftest.py").write_text(f"from tests.conftest import {hooks}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: for this test\n    alone: for this test\n")
    skipped = tmp_path / "skipped"

    def run(*arguments: str, **variables: str) -> str:
        command = [sys.executable, "-m", "pytest", "-v", "-n", "2", "-p", "no:cacheprovider", "--rootdir=."]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
        command += arguments
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    assert "1 passed, 2 skipped" in run("-m", "not slow", SKIPPED_TESTS=str(skipped))
    assert set(skipped.read_text().splitlines()) == {"test_one.py::test_a\tno Slurm here", "test_two.py\tno mkdocs"}
    assert set(left_out.skips(skipped)) == {"skipped: 1 x no Slurm here", "skipped: 1 x no mkdocs"}
    (tmp_path / "test_two.py").write_text("raise AssertionError('imported')\n")
    found = run("-m", "alone")
    assert "test_one.py::test_d" in found and "1 passed" in found and "skipped" not in found


def test_the_workflow_and_the_hooks_use_what_the_project_uses():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["tests"]["steps"][-1] == {"run": ".ci/run"}
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert f"ruff=={hooks['rev'][1:]}\n" in (ROOT / "requirements.lock").read_text()
