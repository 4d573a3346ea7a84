"""The graders could be their own package: they import nothing else of this one; nothing imports their insides."""

import importlib

from tests.unit.test_imports import MODULES, PACKAGE, imports, module_of

ROOM = ("answers", "math", "choice", "code", "equivalence", "tools", "sandbox")
OUTSIDE = {"megatron_rft.responses", "megatron_rft.utils.errors", "megatron_rft.rewards.base"}
OUTSIDE |= {"megatron_rft.utils.processes.start_helper"}  # every process of a run is started there
DOOR = {
    "math.MathReward",
    "choice.ChoiceReward",
    "choice.FormatReward",
    "code.CodeReward",
    "code.container",
    "code.Interpreter",
    "code.last_program",
    "tools.verifier.ToolReward",
    "tools.calls.MARKERS",
    "tools.calls.Call",
    "tools.calls.Malformed",
    "tools.calls.equal",
    "tools.calls.tool_calls",
}


def in_room(name: str) -> bool:
    """Whether a dotted name is of a grader: megatron_rft.rewards.math.MathReward."""
    return name.startswith("megatron_rft.rewards.") and name.split(".")[2] in ROOM


def test_graders_import_nothing_else_of_the_package():
    for path in MODULES:
        if in_room(module_of(path)) or module_of(path) == "megatron_rft.rewards.base":
            own = {name for name in imports(path) if name.startswith("megatron_rft.") and not in_room(name)}
            foreign = {name for name in own if not any(f"{name}.".startswith(f"{each}.") for each in OUTSIDE)}
            assert not foreign, f"{path.relative_to(PACKAGE)} imports {foreign}"


def test_others_import_only_the_door():
    examples = (PACKAGE.parent / "examples").rglob("*.py")
    for path in [*(each for each in MODULES if not in_room(module_of(each))), *examples]:
        inside = {name.removeprefix("megatron_rft.rewards.") for name in imports(path) if in_room(name)} - DOOR
        assert not inside, f"{path} imports {inside}"


def test_every_name_of_the_door_exists():
    for each in DOOR:
        module, _, name = each.rpartition(".")
        assert hasattr(importlib.import_module(f"megatron_rft.rewards.{module}"), name)
