"""The package as users install it: a wheel in an environment that does not see this checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.integration.tiny import ROOT, write_recipe

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, because setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "megatron_rft", folder / "source" / "megatron_rft", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def program(wheel, tmp_path_factory) -> Path:
    """megatron-rft of a new environment with the wheel, which finds the other packages where the tests have them."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # without what its own .pth files say
    return folder / "bin" / "python"


def run(program: Path, folder: Path, *words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(program), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def test_every_file_is_in_it(wheel):
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "megatron_rft").rglob("*") if path.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    assert not files - set(zipfile.ZipFile(wheel).namelist())


def test_doctor_plan_and_a_run_from_an_empty_folder(program, tmp_path):
    recipe = str(write_recipe(tmp_path, run={"steps": 2}))
    empty = tmp_path / "empty"
    empty.mkdir()
    where = run(program, empty, "-c", "import megatron_rft; print(megatron_rft.__file__)")
    assert where.startswith(str(program.parents[1]))
    command = (program, empty, "-m", "megatron_rft")
    assert "megatron-core" in run(*command, "doctor")
    assert "response" in run(*command, "plan", recipe)
    assert "pass@1" in run(*command, "train", recipe)
    assert (tmp_path / "run/export/model.safetensors").exists()
