"""On 3 ranks: megatron_rft.megatron.cpu.optimizer beside torch's own collectives, in parts of several chunks."""

import torch
import torch.distributed as dist
from megatron.core.distributed import param_and_grad_buffer

from megatron_rft.config import Megatron
from megatron_rft.megatron import parallel
from megatron_rft.megatron.cpu import optimizer


def main():
    parallel.initialize(Megatron())
    rank, ranks, length = dist.get_rank(), dist.get_world_size(), 10
    optimizer.CHUNK = 4
    torch.manual_seed(rank)
    gradients, part = torch.randn(ranks * length), slice(rank * length, (rank + 1) * length)
    expected = torch.empty(length)
    dist.reduce_scatter_tensor(expected, gradients.clone())
    param_and_grad_buffer.dist_reduce_scatter_func(gradients[part], gradients)
    torch.testing.assert_close(gradients[part], expected)

    weights = torch.full((ranks * length,), float(rank), dtype=torch.bfloat16)
    param_and_grad_buffer.dist_all_gather_func(weights, weights[part])
    assert torch.equal(weights, torch.arange(ranks).repeat_interleave(length).to(weights.dtype))
    print("SAME", flush=True)
    parallel.shutdown()


if __name__ == "__main__":
    main()
