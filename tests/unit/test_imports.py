"""Who may import whom: read from the sources, so that an import inside a function counts as well."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_rft"
FREE = {"records", "errors", "config", "processes", "files", "own"}  # anybody may import these
SIBLINGS = {
    "objectives": set(),
    "conversion": set(),
    "megatron": {"conversion"},
    "rollout": {"rewards"},
    "rewards": set(),
    "data": set(),
    "tracking": set(),
    "evaluation": {"rollout", "rewards", "data"},
    "weight_sync": {"rollout", "megatron", "conversion"},
}
TOP = {"trainers", "cli", "arguments", "launcher", "doctor", "__main__"}
WITHOUT_TORCH = {
    "cli",
    "arguments",
    "launcher",
    "slurm",
    "job",
    "processes",
    "files",
    "doctor",
    "errors",
    "config",
    "own",
    "__main__",
    "__init__",
}
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The package's top-level part that a file belongs to: megatron_rft/megatron/actor.py -> megatron."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path, only_at_import: bool = False) -> set[str]:
    """Dotted names that a file imports; `only_at_import` leaves out those inside functions."""
    found: set[str] = set()
    nodes = list(ast.parse(path.read_text()).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who is imported"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        if not (only_at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            nodes += list(ast.iter_child_nodes(node))
    return found


def own_parts(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("megatron_rft.")} - {"__version__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path):
    part = part_of(path)
    used = own_parts(imports(path)) - {part}
    if part in TOP:
        return
    allowed = FREE | SIBLINGS[part] if part in SIBLINGS else {"errors", "files"}
    if part == "objectives":
        allowed = {"records", "errors"}
    assert used <= allowed, f"{part} must not import {sorted(used - allowed)}"


def test_objectives_are_pure_torch():
    for path in (PACKAGE / "objectives").rglob("*.py"):
        foreign = {name.split(".")[0] for name in imports(path)} - {"megatron_rft", "torch"} - sys.stdlib_module_names
        assert not foreign, f"{path.name} imports {foreign}"


@pytest.mark.parametrize("path", [p for p in MODULES if part_of(p) in WITHOUT_TORCH], ids=lambda path: path.name)
def test_no_torch_before_a_recipe_is_checked(path: Path):
    roots = {name.split(".")[0] for name in imports(path, only_at_import=True)}
    assert not roots & {"torch", "megatron", "transformers", "datasets", "numpy"}
    assert own_parts(imports(path, only_at_import=True)) <= WITHOUT_TORCH


def test_the_command_line_loads_no_torch_for_a_plan():
    code = "import sys; from megatron_rft import cli; cli.parse(['doctor']); "
    code += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]
