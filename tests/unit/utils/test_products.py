import os
import subprocess
import sys

import pytest
import torch

from megatron_rft.utils import products

IN_ITS_OWN_PROCESS = """
import torch, warnings
from torch.nn.functional import linear
from megatron_rft.utils import products

warnings.simplefilter("error")
torch.manual_seed(0)
x, weight, bias = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((3, 70, 64), (32, 64), (32,)))


def found_by(x, weight, bias):
    scores = x @ x.transpose(1, 2)
    added = torch.baddbmm(scores, x, x.transpose(1, 2), beta=0.5, alpha=2.0)
    found = [linear(x, weight, bias), linear(x, weight), scores, added]
    total = sum(each.float().square().sum() for each in found)
    return found + list(torch.autograd.grad(total, (x, weight, bias)))


before = found_by(x, weight, bias)
torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: False  # so this is tested on other CPUs, too
products.install_bf16()
calls = len(products._libraries)
after = found_by(x, weight, bias)
wide = found_by(*(each.detach().float().requires_grad_() for each in (x, weight, bias)))
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
    multiply = products._rounded_once(torch.mm)
    a, b = torch.tensor([[1.0, 2.0**-9]]), torch.tensor([[1.0], [1.0]])
    assert multiply(a, b).item() == 1 + 2.0**-9  # fp32 stays fp32
    assert multiply(a.bfloat16(), b.bfloat16()).item() == 1.0
    many = torch.full((1, 256), 2.0**-8, dtype=torch.bfloat16)  # a bf16 sum would stop at 0.5 or so
    assert multiply(many, torch.ones(256, 1, dtype=torch.bfloat16)).item() == 1.0


BATCHES_OF_ALL_LENGTHS = """
import torch

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

weight, before = torch.ones(256, 128), resident()
for length in range(1000, 1500):
    torch.ops.mkldnn._linear_pointwise.default(torch.ones(length, 128), weight, None, "none", [], "")
print(resident() - before)
"""


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
def test_few_kernels_stay_in_memory():
    command = [sys.executable, "-c", BATCHES_OF_ALL_LENGTHS]
    kinds = dict.fromkeys(products.FEW_KERNELS, "1024"), products.FEW_KERNELS
    many, few = (int(subprocess.check_output(command, env=os.environ | kind)) for kind in kinds)
    assert few < many / 2, (few, many)


@pytest.fixture
def slow_mkl(monkeypatch):
    """torch's own products, on a CPU where MKL is slow; afterwards what this process had before."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    had = products._libraries.pop("fp32", None) is not None
    with monkeypatch.context() as patch:
        patch.setattr(products, "mkl_is_slow", lambda: True)
        patch.setattr(products, "cpu_words", lambda: {"avx_vnni"})
        yield patch
    products.restore("fp32")
    if had:
        products.install_fp32()


def test_fp32_by_onednn_is_as_near_as_torchs(slow_mkl):
    """In each layout that layers and their backward passes use, with a bias or scaled, and with no rows at all."""
    torch.manual_seed(0)
    given = [torch.randn(*shape) for shape in ((300, 128), (96, 128), (300, 96), (96,))]
    cases = {
        "forward": lambda x, weight, grad, bias: x @ weight.t(),
        "gradient of x": lambda x, weight, grad, bias: grad @ weight,
        "gradient of weight": lambda x, weight, grad, bias: grad.t() @ x,
        "columns of both": lambda x, weight, grad, bias: x[:, ::2] @ weight[:, 64:].t(),
        "bias": lambda x, weight, grad, bias: torch.nn.functional.linear(x, weight, bias),
        "scaled": lambda x, weight, grad, bias: torch.addmm(x.new_zeros(()), x, weight.t(), beta=0, alpha=0.7),
        "both": lambda x, weight, grad, bias: torch.addmm(bias, x, weight.t(), beta=0.5, alpha=2),
        "nothing": lambda x, weight, grad, bias: x[:0] @ weight.t(),
    }
    torchs = {name: case(*given) for name, case in cases.items()}
    products.install_fp32()
    for name, case in cases.items():
        exact, ours = case(*(each.double() for each in given)), case(*given)
        assert ours.shape == exact.shape and (ours - exact).norm() <= 3 * (torchs[name] - exact).norm(), name


@pytest.mark.parametrize("words, expected", [({"avx512f"}, [3]), ({"avx512f", "avx_vnni"}, [0, 1, 2, 3])])
def test_up_to_zen_4_onednn_multiplies_many_rows_alone(slow_mkl, words, expected):
    """Not those of a step of generation, nor the gradient of a weight, whose sums are long."""
    slow_mkl.setattr(products, "cpu_words", lambda: words)
    multiply = products._by_onednn("mm", lambda first, second: None)
    shapes = (256, 128), (511, 256), (600, 601), (600, 512)
    products_of = [multiply(torch.zeros(rows, inner), torch.zeros(inner, 64)) for rows, inner in shapes]
    assert [place for place, product in enumerate(products_of) if product is not None] == expected


def test_restored_products_are_torchs(slow_mkl):
    seen = []
    slow_mkl.setattr(products, "_by_onednn", lambda name, product: lambda *given: seen.append(name) or given[0] + 4)
    products.install_fp32()
    assert (torch.ones(2, 2) @ torch.ones(2, 2) == 5).all() and seen == ["mm"]
    products.restore("fp32")
    assert (torch.ones(2, 2) @ torch.ones(2, 2) == 2).all() and seen == ["mm"]
