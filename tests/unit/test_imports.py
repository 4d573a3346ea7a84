"""Checks which package may import which, from the sources, so that imports inside functions count as well."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_rft"
# Each part, and the parts that it may import beside itself. `commands` and `training` tie the others together.
BELOW = {"records", "responses", "utils", "families", "config", "plan"}
ALLOWED = {
    "utils": set(),
    "records": {"responses"},
    "responses": {"utils"},
    "families": {"utils"},
    "config": {"utils"},
    "plan": {"utils", "families", "config"},
    "objectives": {"records", "responses", "utils", "config"},
    "conversion": BELOW,
    "megatron": BELOW | {"conversion"},
    "rewards": BELOW,
    "data": BELOW,
    "inference": BELOW | {"megatron", "conversion"},
    "environments": BELOW | {"inference", "rewards", "data"},
    "rollout": BELOW | {"inference", "rewards"},
    "evaluation": BELOW | {"inference", "rewards", "data"},
    "tracking": BELOW,
    "report": BELOW | {"tracking"},
    "launching": BELOW,
    "training": BELOW
    | {"objectives", "conversion", "megatron", "rewards", "data", "inference", "rollout", "evaluation", "tracking"}
    | {"report", "launching", "environments"},
    # below commands/rehearse.py alone
    "rehearsal": BELOW | {"training", "objectives", "conversion", "megatron"},
}
TOP = {"commands", "api", "__main__", "__init__"}
WITHOUT_TORCH = {
    "api",
    "commands/main",
    "commands/parser",
    "commands/doctor",
    "commands/train",
    "commands/rehearse",
    "rehearsal/__init__",
    "rehearsal/guard",
    "rehearsal/ledger",
    "rehearsal/report",
    "commands/__init__",
    "launching",
    "environments/__init__",
    "environments/base",
    "environments/worker",
    "environments/process",
    "rewards/base",
    "rewards/signatures",
    "rewards/user_reward",
    "rewards/worker",
    "tracking/loggers",
    "responses",
    "utils",
    "families",
    "config",
    "plan",
    "__main__",
    "__init__",
}
# Functions that take the whole recipe. Each number may only go down.
TAKE_THE_RECIPE = {"outside": 8, "config and plan": 23}
INTERFACE = {"api.py", "plan/__init__.py", "config/loading.py:load"}  # from Python, whose functions begin with a recipe
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The package's top-level part that a file belongs to: megatron_rft/megatron/actor.py -> megatron."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, only_at_import: bool = False) -> set[str]:
    """Dotted names that a file imports; `only_at_import` leaves out those inside functions."""
    found: set[str] = set()
    nodes = list(parsed(path).body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide who is imported"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        later = for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if not (only_at_import and later):
            nodes += list(ast.iter_child_nodes(node))
    return found


def own_parts(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("megatron_rft.")} - {"__version__"}


def imported_modules(path: Path) -> set[str]:
    """The package's modules that a file imports, itself or a name of theirs."""
    modules = {module_of(other) for other in MODULES}
    names = {name for name in imports(path) if name.startswith("megatron_rft.")}
    return {name if name in modules else name.rpartition(".")[0] for name in names} - {module_of(path)}


def test_every_part_has_its_place():
    assert {part_of(path) for path in MODULES} == set(ALLOWED) | TOP


def test_imports_go_downwards():
    wrong = []
    for path in MODULES:
        part = part_of(path)
        if part not in TOP:
            above = own_parts(imports(path)) - {part} - ALLOWED[part]
            wrong += [f"{path.relative_to(PACKAGE)} must not import {name}" for name in sorted(above)]
    assert not wrong, "\n".join(wrong)


def test_no_two_files_import_each_other():
    """A package's __init__ does not count as imported by the files of the package."""
    used = {module_of(path): imported_modules(path) for path in MODULES if path.name != "__init__.py"}
    pairs = {tuple(sorted((a, b))) for a, others in used.items() for b in others if a in used.get(b, ())}
    assert not pairs, "\n".join(f"{a} <-> {b}" for a, b in sorted(pairs))


def test_objectives_are_pure_torch():
    for path in (PACKAGE / "objectives").rglob("*.py"):
        foreign = {name.split(".")[0] for name in imports(path)} - {"megatron_rft", "torch"} - sys.stdlib_module_names
        assert not foreign, f"{path.name} imports {foreign}"


def without_torch(name: str) -> bool:
    """Whether `name`, a file's path below the package without its suffix, is used before torch is imported."""
    return name in WITHOUT_TORCH or name.split("/")[0] in WITHOUT_TORCH


def test_no_torch_before_a_recipe_is_checked():
    wrong = []
    for path in MODULES:
        if not without_torch(str(path.relative_to(PACKAGE).with_suffix(""))):
            continue
        roots = {name.split(".")[0] for name in imports(path, only_at_import=True)}
        own = {name.removeprefix("megatron_rft.") for name in imports(path, only_at_import=True) if ".__" not in name}
        own = {name.replace(".", "/") for name in own if name.split(".")[0] in set(ALLOWED) | {"commands"}}
        above = {name for name in own if not (without_torch(name) or without_torch(name.rpartition("/")[0]))}
        wrong += [f"{path.relative_to(PACKAGE)}: {name}" for name in above]
        wrong += [f"{path.relative_to(PACKAGE)}: {name}" for name in roots & {"torch", "transformers", "datasets"}]
    assert not wrong, "\n".join(wrong)


def test_the_command_line_loads_no_torch_for_a_plan():
    code = "import sys; from megatron_rft.commands import main; main.parse(['doctor']); "
    code += "print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]


def takes_the_recipe(function: ast.FunctionDef) -> bool:
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return any(a.arg == "recipe" or "Recipe" in ast.unparse(a.annotation or ast.Constant("")) for a in arguments)


def test_the_functions_that_take_the_whole_recipe_become_fewer():
    found: dict[str, list[str]] = {"outside": [], "config and plan": []}
    for path in MODULES:
        where = "config and plan" if part_of(path) in ("config", "plan") else "outside"
        functions = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.FunctionDef)]
        names = [f"{path.relative_to(PACKAGE)}:{f.name}" for f in functions if takes_the_recipe(f)]
        found[where] += [name for name in names if not {name, name.partition(":")[0]} & INTERFACE]
    for where, names in found.items():
        most = TAKE_THE_RECIPE[where]
        listed = "\n".join(sorted(names))
        assert len(names) <= most, f"{len(names)} functions {where} take the whole recipe, {most} may:\n{listed}"
        assert len(names) == most, f"only {len(names)} take it {where} now: lower the number here"


# Ranks get the signals, a helper starts the sandbox's insides, and the others are no processes of a run.
STARTING = {"utils/processes", "launching/ranks", "commands/rehearse", "commands/doctor", "rehearsal/rank", "api"}
STARTING |= {
    "utils/end_with_parent",
    "rehearsal/guard",
    "rewards/sandbox/inside/container",
    "rewards/sandbox/inside/cell",
}
STARTED = r"subprocess\.(Popen|run|call|check_\w+|getoutput)\(|os\.(fork|system|posix_spawn|popen)|ProcessPool"
STARTED += r"|multiprocessing\.(get_context|Process|Pool)|\.Process\("


def test_every_process_of_a_run_is_started_in_one_place():
    """By `start_helper`, so that no signal to a whole run can end it before the run."""
    for path in MODULES:
        name = str(path.relative_to(PACKAGE).with_suffix(""))
        found = re.search(STARTED, path.read_text())
        assert not found or name in STARTING, f"{name}: {found[0]}: use utils.processes.start_helper"
