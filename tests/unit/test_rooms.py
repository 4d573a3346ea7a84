"""The rooms of tests/unit are those of the package, and the tests of a room reach each of its modules."""

from functools import cache
from pathlib import Path

import pytest

from megatron_rft.config.algorithms import ALGORITHMS
from megatron_rft.config.rewards import REWARDS
from tests.unit.test_imports import MODULES, PACKAGE, imports, module_of

TESTS = Path(__file__).resolve().parents[1]
UNIT = TESTS / "unit"
OTHER_FOLDERS = {"examples", "rewards/attack_programs"}
ROOMS = sorted({path.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/*.py")})
# Modules that tests meet through a command, or in a process of their own: by the test that does.
STARTED = {
    "inference/process_worker": "integration/test_engine_processes.py",
    "inference/vllm/seeing_server": "integration/test_vision.py",
    "inference/vllm/worker_extension": "parity/test_vllm_server.py",
    "rehearsal/rank": "integration/test_rehearse.py",
    "rewards/signatures": "unit/rewards/test_user_reward.py",
    "report/status": "unit/report/test_status.py",
    "rewards/worker": "unit/rewards/test_user_reward.py",
    "rewards/sandbox/inside": "unit/rewards/test_sandbox.py",
    "training/diagnosis": "integration/test_diagnose.py",
}
# Modules that are imported by their names in a table.
NAMED = {"megatron_rft.commands.main": {module_of(path) for path in (PACKAGE / "commands").glob("*.py")}}
NAMED["megatron_rft.training"] = {f"megatron_rft.training.{name}" for name in ("online", "sft", "offline", "generate")}
for room, table in (("objectives", ALGORITHMS), ("rewards.registry", REWARDS)):
    names = [name for _, name in table.values() if name]
    NAMED[f"megatron_rft.{room}"] = {f"megatron_rft.{room.split('.')[0]}.{n.rpartition('.')[0]}" for n in names}
FILES = {module_of(path): path for path in MODULES}


@cache
def used(path: Path) -> set[str]:
    """The package's modules that a file imports; a test, also through its helpers in tests/."""
    found = set()
    for name in imports(path):
        parts = name.split(".")
        found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
        helper = TESTS.parent.joinpath(*parts[:-1]).with_suffix(".py")
        if parts[0] == "tests" and helper.is_file() and not helper.name.startswith("test_"):
            found |= used(helper)
    return found & FILES.keys()


@pytest.mark.parametrize("room", ROOMS)
def test_each_module_is_reached_by_the_tests_of_its_room(room):
    """By an import in tests/unit/ROOM, or in a module of the room that is reached."""
    own = {name for name in FILES if name.split(".")[1:2] == [room]}
    reached: set[str] = set()
    left = {name for path in (UNIT / room).rglob("*.py") for name in used(path)} & own
    while left:
        reached |= left
        left = {name for one in left for name in used(FILES[one]) | NAMED.get(one, set())} & own - reached
    places = {name: FILES[name].relative_to(PACKAGE).with_suffix("").as_posix() for name in own - reached}
    missing = {name for name, place in places.items() if not place.startswith(tuple(STARTED))}
    assert not missing, f"no test in tests/unit/{room} reaches {', '.join(sorted(missing))}"


def test_the_folders_of_unit_tests_are_those_of_the_package():
    folders = {path.parent.relative_to(UNIT).as_posix() for path in UNIT.rglob("*.py")} - OTHER_FOLDERS
    assert not [name for name in folders if not (PACKAGE / name).is_dir()]
    assert all((PACKAGE / f"{name}.py").is_file() or (PACKAGE / name).is_dir() for name in STARTED)
    assert all((TESTS / test).is_file() for test in STARTED.values())
