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
    assert "bash tests/run.sh -m slow " in run and "tests/parity/test_gradient_invariance.py" in run
    assert "tests/slurm" not in run
    assert len(left_out.lines(["README.md"])) == 1
    assert left_out.concerned(["tests/slurm/test_scripts.py"], left_out.slow_files()) == [
        ROOT / "tests/slurm/test_scripts.py"
    ]


def test_skipped_tests_are_written_for_a_second_part(tmp_path):
    """A test and a file that are skipped; with workers both the workers and the first process write."""
    (tmp_path / "test_one.py").write_text("import pytest\ndef test_a(): pytest.skip()\ndef test_b(): pass\n")
    (tmp_path / "test_two.py").write_text("import pytest\npytest.skip(allow_module_level=True)\n")
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_collectreport, pytest_runtest_logreport\n")
    environment = os.environ | {"SKIPPED_TESTS": str(tmp_path / "skipped"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "--rootdir=.", "."]
    subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=True)
    assert set((tmp_path / "skipped").read_text().split()) == {"test_one.py::test_a", "test_two.py"}


def test_the_workflow_and_the_hooks_use_what_the_project_uses():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["tests"]["steps"][-1] == {"run": ".ci/run"}
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert f"ruff=={hooks['rev'][1:]}\n" in (ROOT / "requirements.lock").read_text()
