"""The site builds without a warning, and its navigation has every page."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_the_navigation_has_every_page():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = [page for section in nav for pages in section.values() for page in pages]
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


@pytest.mark.slow
def test_it_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra site is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = (tmp_path / "site/reference/index.html").read_text()
    for option in ("group_size", "kl_coefficient", "tensor_parallel_size", "old_logprobs", "max_turns", "rank"):
        assert f">{option}<" in reference, option
    assert "Responses per prompt." in reference
