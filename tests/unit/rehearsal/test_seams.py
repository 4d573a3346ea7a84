"""The rehearsal meets the package at its seams alone: it replaces none of the package's functions from outside."""

import ast
from pathlib import Path

import pytest
import torch

from megatron_rft.megatron import seams
from megatron_rft.rehearsal import patches

FILES = sorted(Path(patches.__file__).parent.glob("*.py"))


def replaced(source: str) -> list[str]:
    """What a file replaces of modules and classes that it imports from other rooms of the package."""
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    of_others = [node for node in imports if node.module.startswith("megatron_rft") and ".rehearsal" not in node.module]
    names = {name.asname or name.name for node in of_others for name in node.names}
    targets = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    patched = [node.args[0] for node in calls if getattr(node.func, "id", "") in ("setattr", "around")]
    return [ast.unparse(node) for node in [*(target.value for target in targets), *patched] if root(node) in names]


def root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return getattr(node, "id", None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_of_the_package_is_replaced(path):
    assert replaced(path.read_text()) == (["seams"] if path.stem == "patches" else [])


def test_a_replaced_function_is_found():
    source = "from megatron_rft.megatron import offload\nfrom megatron_rft.megatron.actor import Actor\n"
    assert replaced(source + "offload.save = None\naround(Actor, 'outputs', None)") == ["offload", "Actor"]


def test_the_rehearsal_has_every_act_and_no_other():
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(patches.ShapeSeams) - {"next_shape"} == public(seams.Seams)


@pytest.mark.parametrize("copy", [True, False], ids=["from a copy", "with zeros"])
def test_a_storage_leaves_and_comes_back(copy):
    tensor = torch.arange(6.0)
    storage, size = tensor.untyped_storage(), tensor.untyped_storage().nbytes()
    kept = seams.now.save(storage, None)
    assert seams.now.save(storage, kept) is kept  # pinned memory is used again
    seams.now.empty(storage)
    assert storage.nbytes() == 0
    seams.now.refill(storage, size, kept if copy else None)
    assert torch.equal(tensor, torch.arange(6.0) if copy else torch.zeros(6))
