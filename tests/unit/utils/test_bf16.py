import subprocess
import sys

import pytest
import torch

from megatron_rft.utils import bf16

IN_ITS_OWN_PROCESS = """
import torch, warnings
from torch.nn.functional import linear
from megatron_rft.utils import bf16

warnings.simplefilter("error")
torch.manual_seed(0)
x, weight, bias = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((3, 70, 64), (32, 64), (32,)))


def products(x, weight, bias):
    scores = x @ x.transpose(1, 2)
    added = torch.baddbmm(scores, x, x.transpose(1, 2), beta=0.5, alpha=2.0)
    found = [linear(x, weight, bias), linear(x, weight), scores, added]
    total = sum(each.float().square().sum() for each in found)
    return found + list(torch.autograd.grad(total, (x, weight, bias)))


before = products(x, weight, bias)
torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: False  # so this is tested on other CPUs, too
bf16.install()
calls = len(bf16._library)
after = products(x, weight, bias)
wide = products(*(each.detach().float().requires_grad_() for each in (x, weight, bias)))
assert calls == 1 and all(a.dtype == b.dtype == torch.bfloat16 for a, b in zip(before, after))
assert all(each.dtype == torch.float32 for each in wide)
for exact, own, ours in zip(wide, before, after):
    error, limit = ((each.float() - exact).norm() / exact.norm() for each in (ours, own))
    assert error <= 1.2 * limit + 1e-3, (error, limit)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_products_are_as_near_as_torchs_and_quiet():
    done = subprocess.run([sys.executable, "-c", IN_ITS_OWN_PROCESS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_result_is_rounded_once():
    multiply = bf16._rounded_once(torch.mm)
    a, b = torch.tensor([[1.0, 2.0**-9]]), torch.tensor([[1.0], [1.0]])
    assert multiply(a, b).item() == 1 + 2.0**-9  # fp32 stays fp32
    assert multiply(a.bfloat16(), b.bfloat16()).item() == 1.0
    many = torch.full((1, 256), 2.0**-8, dtype=torch.bfloat16)  # a bf16 sum would stop at 0.5 or so
    assert multiply(many, torch.ones(256, 1, dtype=torch.bfloat16)).item() == 1.0
