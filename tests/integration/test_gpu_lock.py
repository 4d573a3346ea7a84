"""requirements-gpu.lock still holds every package that `. tools/setup_env.sh gpu,test,smollm2` installs, for each
supported Python.

uv resolves the extras `gpu`, `test` and `gguf` with the lock as constraints, from the packages' metadata: no wheel is
downloaded. Skipped where the package index does not answer.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

uv = pytest.importorskip("uv")
ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements-gpu.lock"
UNREACHABLE = ("error sending request", "torch was not found in the package registry", "timed out")
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
    asked = subprocess.run([sys.executable, "-c", REQUIREMENTS, str(ROOT)], capture_output=True, text=True, check=True)
    platform = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_35", "--only-binary=:all:"]
    output = ["--quiet", "--no-header", "--no-annotate", "--cache-dir", str(tmp_path.parent / "uv")]
    # an index of CPU builds in uv's settings would be another stack
    settings = ("UV_FIND_LINKS", "UV_EXTRA_INDEX_URL", "UV_INDEX", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_OFFLINE")
    environment = {k: v for k, v in os.environ.items() if k not in settings} | {"UV_NO_CONFIG": "1"}
    command = [uv.find_uv_bin(), "pip", "compile", *platform, *output, "--constraint", str(LOCK), "-"]
    done = subprocess.run(command, env=environment, input=asked.stdout, capture_output=True, text=True)
    if done.returncode and any(sign in done.stderr for sign in UNREACHABLE):
        pytest.skip(f"the package index cannot be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    found = dict(line.split("==") for line in done.stdout.splitlines())
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
