"""In an interpreter of its own, because others have imported these modules long before."""

import json
import subprocess
import sys

import pytest

from megatron_rft.utils.late_imports import LATE

TRAINING = """
import json, sys, tempfile, warnings
warnings.simplefilter("ignore")
from megatron_rft.utils.late_imports import LATE, LateModule, lean_import
for name in ("megatron_rft.training.online", "transformers.models.qwen3.modeling_qwen3"):
    lean_import(name)
late = dict(LATE)  # a package that is loaded takes its modules' names out
import inspect, torch, torch.distributed as dist

assert inspect.getframeinfo.__defaults__ == (1,) and inspect.getmodule.__module__ == "inspect", "as before"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=1.0)
weight.sum().backward()
optimizer.step(), optimizer.zero_grad()
print(json.dumps([name for name, module in sys.modules.items() if type(module) is LateModule]))
from megatron.core.utils import DTensor, to_local_if_dtensor
assert not isinstance(weight, DTensor) and to_local_if_dtensor(weight) is weight and not issubclass(int, DTensor)
unused = "sympy tensorboard wandb.errors torch._dynamo.eval_frame torch._inductor torch._export accelerate.state "
assert not {*unused.split(), "torch.distributed.tensor._api", "torch.distributed.checkpoint.api"} & set(sys.modules)

assert torch.compile(lambda x: x.sum() + 1, backend="eager")(torch.ones(2)) == 3
optimizer.step(), optimizer.zero_grad()
mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
split = DTensor.from_local(weight.detach(), mesh)
from torch.distributed.tensor import _collective_utils, DTensor as real, Shard
from megatron.core import utils
assert utils.DTensor is DTensor is not real and isinstance(split, DTensor) and issubclass(real, DTensor)
assert type(to_local_if_dtensor(split)) is torch.Tensor and not isinstance(weight, DTensor)
assert isinstance(Shard(0), utils.Shard) and not isinstance(split.placements[0], utils.Shard)
from megatron_rft.megatron import checkpoint
for each in (checkpoint.filesystem_async, checkpoint.fully_parallel):
    assert each.torch.empty(1, device="cuda").is_cpu, "redirected as modules are that were not late"
assert issubclass(checkpoint.torch_checkpoint.CheckpointException, BaseException)
from transformers.generation.utils import add_hook_to_module, AlignDevicesHook
assert hasattr(add_hook_to_module(torch.nn.Linear(1, 1), AlignDevicesHook()), "_hf_hook")
from transformers.distributed.mixin import _validate_parallel_plan_styles
_validate_parallel_plan_styles({})
from megatron.core.distributed import FullyShardedDataParallel
assert not isinstance(weight, FullyShardedDataParallel)
assert _collective_utils.guard_or_false(weight.shape[0] == 2)
from transformers import masking_utils
with masking_utils.TransformGetItemToIndex():
    pass
from torch.utils.tensorboard import SummaryWriter
class Writer(SummaryWriter):
    def __init__(self, folder):
        super().__init__(folder)
assert type(Writer) is type and Writer.__mro__[1] is sys.modules["torch.utils.tensorboard"].SummaryWriter
with Writer(tempfile.mkdtemp()) as writer:
    writer.add_scalar("loss", 1.0, 1)
from megatron.core.inference import unified_memory
assert issubclass(unified_memory.UnifiedMemoryCompileTimeoutError, unified_memory.UnifiedMemoryUnsupportedError)
import wandb
assert issubclass(wandb.errors.CommError, wandb.Error)
for name in late:
    assert not hasattr(sys.modules[name], "a_name_that_it_lacks"), "another name loads it"
assert all(hasattr(sys.modules[name], each) for name, names in late.items() for each in names)
print([name for name, module in sys.modules.items() if type(module) is LateModule])
"""


def test_they_are_imported_when_they_are_used():
    output = subprocess.check_output([sys.executable, "-c", TRAINING], text=True, stderr=subprocess.STDOUT)
    before, after = output.splitlines()
    assert sorted(json.loads(before)) == sorted(LATE)
    assert after == "[]"


TABLES = """
import importlib, importlib.metadata, json, sys, warnings
warnings.simplefilter("ignore")
from megatron_rft.utils.late_imports import lean_import
transformers = (lean_import if sys.argv[1] == "lean" else importlib.import_module)("transformers")
utils = transformers.utils.import_utils
packages = ("torch", "yaml", "PIL", "tokenizers", "vllm", "not_there")
print(json.dumps([
    sorted(transformers._class_to_module.items()),
    sorted(transformers.models._class_to_module.items()),
    [utils._is_package_available(name, return_version=True) for name in packages],
    [utils.PACKAGE_DISTRIBUTION_MAPPING.get(name) for name in packages],
    "yaml" in utils.PACKAGE_DISTRIBUTION_MAPPING,
    len(importlib.metadata.packages_distributions()),
]))
if sys.argv[1] == "lean":
    assert utils.create_import_structure_from_path.cache_info().hits > 100
"""


def test_what_transformers_reads_once_is_the_same():
    lean, plain = (subprocess.check_output([sys.executable, "-c", TABLES, how]) for how in ("lean", "plain"))
    assert json.loads(lean) == json.loads(plain)
    assert len(json.loads(lean)[0]) > 1000


ONCE = """
import builtins, sys
from pathlib import Path
from megatron_rft.utils.late_imports import LATE, lean_import
package = Path(sys.argv[1], "package_of_two")
package.mkdir()
(package / "__init__.py").write_text("from package_of_two.part import name; from package_of_two import plain")
for part in ("part", "plain"):
    (package / f"{part}.py").write_text("import builtins; builtins.runs.append(__name__); name = 'here'")
LATE.update({"package_of_two": {}, "package_of_two.part": {}})
builtins.runs = []
lean_import("json")
sys.path.insert(0, sys.argv[1])
import package_of_two.part
assert not builtins.runs
if sys.argv[2] == "a part":
    assert sys.modules["package_of_two.part"].name == "here"
import package_of_two.plain as plain
assert sorted(builtins.runs) == ["package_of_two.part", "package_of_two.plain"]
assert plain is sys.modules["package_of_two.plain"] is package_of_two.plain
assert plain.__spec__.origin == plain.__file__ and plain.__spec__.loader is plain.__loader__
from package_of_two import part
assert part.name == "here" and len(builtins.runs) == 2
assert lean_import("package_of_two.plain") is plain
"""


@pytest.mark.parametrize("first", ["a part", "what is never late"])
def test_a_module_that_its_package_imports_runs_once(tmp_path, first):
    subprocess.check_call([sys.executable, "-c", ONCE, str(tmp_path), first])
