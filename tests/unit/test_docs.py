"""Checks the documentation: links, commands, options and metrics exist, recipes load, and Python examples run."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from pydantic_core import PydanticCustomError

from megatron_rft.commands import main
from megatron_rft.config import load, passthrough
from megatron_rft.config.algorithms import SECTIONS
from megatron_rft.config.loading import _Loader
from megatron_rft.config.one_of import Choices
from megatron_rft.config.rewards import REWARDS
from megatron_rft.config.trainers import TRAINERS, WHOLE

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
NOT_OPTIONS = re.compile(r".*\.(py|md)|run\.json|model\.safetensors|megatron\.core.*|vllm\..*")  # vLLM's own names
NAMES = {name for recipe in TRAINERS.values() for name in recipe.model_fields}
MINIMAL = {
    "run": {"output_dir": "x"},
    "model": {"path": "m"},
    "data": {"train": "examples/quickstart/arithmetic.py:rows"},
}


def ids(path: Path) -> str:
    return path.name


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.S | re.M)


def in_backticks(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M))


def slug(heading: str) -> str:
    """A heading's anchor, as usual renderers make it: `PIPO's xi` -> pipos-xi."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", place.read_text(encoding="utf-8"), re.M)
            assert anchor in map(slug, headings), f"{page.name}: {target}"


def commands(page: Path) -> list[str]:
    """Lines in code blocks that are commands of this package, without comments."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^ *(megatron-rft [a-z].*?) *(?:#.*)?$", text, re.M)


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=ids)
def test_commands_parse(page):
    for command in commands(page):
        words = [word for word in shlex.split(command)[1:] if word not in ("...", "|", "[--out]")]
        try:
            args = main.parse(words)
        except SystemExit:
            pytest.fail(f"{page.name}: {command}")
        overrides = getattr(args, "overrides", [])
        recipe = ROOT / getattr(args, "recipe", "none")
        if recipe.is_file():
            load(recipe, overrides)
        for override in overrides:
            assert exists(override.partition("=")[0]), f"{page.name}: {command}"


def exists(key: str) -> bool:
    """Whether a recipe has this option or section."""
    place = tuple(key.split("."))
    if Choices.at(place, WHOLE).having(place[-1]):
        return True
    with suppress(PydanticCustomError):
        if place[0] in ("megatron", "optimizer"):
            passthrough.check_megatron_core(place[0], {place[-1]: None}, ())
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_options_exist(page):
    """Text in backticks that looks like section.option, with or without a value."""
    for text in in_backticks(page):
        found = re.fullmatch(r"([a-z]\w*(?:\.[a-z]\w*)+)(?:[:=] ?\S.*)?", text)
        if found and found[1].split(".")[0] in NAMES and not NOT_OPTIONS.fullmatch(found[1]):
            assert exists(found[1]), f"{page.name}: {text}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_kinds_of_rewards_exist(page):
    for listed in re.findall(r"`reward\.kind`: ((?:`\w+`(?:, )?)+)", page.read_text(encoding="utf-8")):
        assert set(re.findall(r"\w+", listed)) <= set(REWARDS)


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_metrics_are_in_the_table(page):
    table = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    sections = {name.partition("/")[0] for name in re.findall(r"`([a-z]+/[\w@]+)`", table)}
    for text in in_backticks(page):
        if re.fullmatch(r"[a-z]+/[\w@]+", text) and text.partition("/")[0] in sections:
            families = re.findall(r"`([a-z]+/\w*)(?:\*|<\w+>)`", table)
            assert f"`{text}`" in table or text.startswith(tuple(families)), f"{page.name}: {text}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "yaml")], ids=ids)
def test_recipes_load(page, tmp_path):
    """Parts of recipes load with the options that every recipe needs."""
    for block in blocks(page, "yaml"):
        content = yaml.load(block, _Loader)
        assert isinstance(content, dict), f"{page.name}: {block}"
        content.pop("base", None)
        if content.keys() - NAMES:
            pytest.fail(f"{page.name}: no sections of a recipe: {sorted(content)}")
        for name, section in MINIMAL.items():
            content[name] = section | content.get(name, {})
        if content.get("trainer", "rl") == "rl":
            content["run"].setdefault("steps", 10)
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
        load(tmp_path / "recipe.yaml")


def files_of(page: Path, folder: Path) -> list[Path]:
    """The named examples, written to files."""
    found = []
    for block in blocks(page, "python"):
        if name := re.match(r"# (\w+\.py)\n", block):
            found.append(folder / name[1])
            found[-1].write_text(block)
    return found


@pytest.mark.parametrize("name", ["own_algorithm.md", "own_data_and_reward.md", "agents.md"])
def test_examples_in_python_run(name, tmp_path):
    files = files_of(ROOT / "docs" / name, tmp_path)
    tests = [file for file in files if file.name.startswith("test_")]
    assert tests and len(files) > len(tests)
    for test in tests:
        done = subprocess.run(
            [sys.executable, test.name],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr


def test_the_readme_names_every_algorithm():
    table = re.search(r"^\| algorithms \|.*?\n\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)[0]
    named = set(re.findall(r"`([a-z_]+)`", table)) - {"pipo", "constraint", "lora"}
    assert named == set(SECTIONS)
