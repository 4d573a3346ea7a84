"""In an interpreter of its own, because others have imported these modules long before."""

import json
import subprocess
import sys

from megatron_rft.utils.late_imports import LATE

TRAINING = """
import json, sys, tempfile, warnings
warnings.simplefilter("ignore")
from megatron_rft.utils.late_imports import LATE, LateModule, lean_import
for name in ("megatron_rft.training", "transformers.models.qwen3.modeling_qwen3"):
    lean_import(name)
import torch, torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=1.0)
weight.sum().backward()
optimizer.step(), optimizer.zero_grad()
print(json.dumps([name for name, module in sys.modules.items() if type(module) is LateModule]))
assert not {"sympy", "tensorboard", "wandb.errors", "torch._dynamo.eval_frame", "torch._inductor"} & set(sys.modules)

assert torch.compile(lambda x: x.sum() + 1, backend="eager")(torch.ones(2)) == 3
optimizer.step(), optimizer.zero_grad()
from torch.distributed.tensor import _collective_utils
assert _collective_utils.guard_or_false(weight.shape[0] == 2)
from transformers import masking_utils
with masking_utils.TransformGetItemToIndex():
    pass
from torch.utils.tensorboard import SummaryWriter
with SummaryWriter(tempfile.mkdtemp()) as writer:
    writer.add_scalar("loss", 1.0, 1)
import wandb
assert issubclass(wandb.errors.CommError, wandb.Error)
assert all(hasattr(sys.modules[name], each) for name, names in LATE.items() for each in names)
print([name for name, module in sys.modules.items() if type(module) is LateModule])
"""


def test_they_are_imported_when_they_are_used():
    output = subprocess.check_output([sys.executable, "-c", TRAINING], text=True, stderr=subprocess.STDOUT)
    before, after = output.splitlines()
    assert sorted(json.loads(before)) == sorted(LATE)
    assert after == "[]"
