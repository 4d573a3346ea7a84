"""The routers of a mixture of experts: replay of the engine's experts, loads of the experts, and their balance.

Router replay: the model computes with the experts that the engine used for a token, forward and backward. The weights
of the experts are those of the current router, and its gradient flows through them. megatron-core asks a router's
`router_replay` for the experts; its own keeps all routers of the process in one list. Here each model's routers have
objects of their own, so another model of the process, such as a critic, is unaffected.

Recomputation runs a router again during the backward pass, when later micro-batches have passed. Backward passes come
in the order of forward passes, so each router remembers the routes of its unfinished first passes.

Balancing without an auxiliary loss (arXiv 2408.15664): after an optimizer step the bias of each expert, which chooses
but does not weigh, moves by a fixed rate towards the mean load. Counts are those of the whole mini-batch: padding does
not count, and a shared prompt counts for each of its responses, so that no layout changes them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_rft.megatron import parallel
from megatron_rft.megatron.packing import MicroBatch, fed_lens
from megatron_rft.records import Batch
from megatron_rft.utils.errors import RunFailed


class RouterChoice:
    """The choice of one router. `routes` [tokens, experts per token]: of the micro-batch that comes next, -1 for tokens
    whose experts the router chooses; None: it chooses all. `uses` [tokens]: the sequences that have each token."""

    def __init__(self, router: TopKRouter):
        self.router, self.routes, self.uses = router, None, None
        self.unfinished: list[Tensor | None] = []
        self.loads = torch.zeros(router.num_experts, dtype=torch.long, device=parallel.device())

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, choose: Callable
    ) -> tuple[Tensor, Tensor]:
        """[tokens, experts] scores -> [tokens, topk] scores and numbers of the experts. megatron-core's signature."""
        values, chosen = choose(scores, topk, num_groups=num_groups, group_topk=group_topk)
        training, differentiates = self.router.training, torch.is_grad_enabled()
        again = differentiates and bool(self.unfinished)
        routes = self.unfinished.pop(0) if again else self.routes
        if training and not differentiates:  # will be computed again
            self.unfinished.append(routes)
        if routes is not None:
            chosen = torch.where(routes < 0, chosen, routes.long())
            values = scores.gather(1, chosen)
        if training and not again:
            self.loads.index_add_(0, chosen.flatten(), self.uses.repeat_interleave(topk))
        return values, chosen


class Routers:
    """The routers of one model on this rank."""

    def __init__(self, chunks: list):
        self.routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
        self.choices = [RouterChoice(router) for router in self.routers]
        for router, choice in zip(self.routers, self.choices, strict=True):
            router.router_replay = choice
            if router.expert_bias is not None:  # published values need fp32, also in a model of lower precision
                router.expert_bias.data = router.expert_bias.data.float()
        self.store = None
        self.total = 0  # loads since the last `take`, [layers of this rank, experts]

    def replay(self, store: Any) -> None:
        """Replay the engine's experts. `store`: the routes of this rank's engine, a RouteStore of rollout/routes.py.
        Collective."""
        self.store = store
        places = [store.layers.index(router.layer_number - 1) for router in self.routers]
        # Of each rank: the layers that it computes, and the share of the batch.
        self.ranks = parallel.from_all_ranks((places, parallel.dp_rank()), "start")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In this context no routes are replayed."""
        before, self.store = self.store, None
        try:
            yield
        finally:
            self.store = before

    def start(self, forward_only: bool) -> None:
        """Drop what an interrupted pass has left and, before a gradient is computed, the loads of the last one."""
        for choice in self.choices:
            choice.unfinished.clear()
            if not forward_only:
                choice.loads.zero_()

    def begin(self, micro: MicroBatch, sequence_parallel: bool) -> None:
        """The next forward pass is that of `micro`."""
        routes, uses = micro.routes, micro.uses
        if sequence_parallel:
            uses = uses.chunk(parallel.tp_size())[parallel.tp_rank()]
            routes = None if routes is None else routes.chunk(parallel.tp_size())[parallel.tp_rank()]
        for place, choice in enumerate(self.choices):
            choice.routes, choice.uses = None if routes is None else routes[:, place], uses

    def trained(self, rate: float) -> None:
        """After an optimizer step: add up its loads over the ranks, and move the biases by `rate`. Collective."""
        if not self.choices:
            return
        loads = torch.stack([choice.loads for choice in self.choices])  # [layers of this rank, experts]
        dist.all_reduce(loads, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
        self.total = self.total + loads
        if rate:
            behind = (loads.double().mean(-1, keepdim=True) - loads).sign().float()
            for router, direction in zip(self.routers, behind, strict=True):
                router.expert_bias += rate * direction

    def take(self) -> dict[int, list[int]]:
        """Return the loads since the last call: layer, from 0 -> tokens of each expert. Collective."""
        total, self.total = self.total, 0
        own = total.tolist() if self.choices and isinstance(total, Tensor) else []
        layers = [router.layer_number - 1 for router in self.routers]
        parts = parallel.from_all_ranks(dict(zip(layers, own, strict=False)), "generation")
        return dict(sorted(item for part in parts for item in part.items()))

    def of_shares(self, batch: Batch, shares: list[list[Tensor]]) -> dict[int, Tensor]:
        """Return the routes of this rank's sequences, by position in the batch: [fed tokens, layers of this rank,
        experts per token]. `shares`: [data-parallel rank][micro-batch] -> positions. Each rank that has routes sends
        the layers that the others compute. Collective."""
        if self.store is None or "route" not in batch.sequences:
            return {}
        keys, tokens = batch.sequences["route"].tolist(), (batch.prompt_lens + fed_lens(batch)).tolist()
        owners, rank = self._owners(batch, keys), dist.get_rank()
        wanted = [[p for p in torch.cat(share).tolist() if owners[p] >= 0] for share in shares]

        def sent(source: int, target: int) -> list[int]:
            return [p for p in wanted[self.ranks[target][1]] if owners[p] == source]

        everyone, own = range(len(self.ranks)), len(self.ranks[rank][0])
        parcels = [[self.store.held[keys[p]][:, self.ranks[to][0]] for p in sent(rank, to)] for to in everyone]
        width = own * self.store.chosen * self.store.dtype.itemsize  # bytes of a token
        received = torch.empty(sum(tokens[p] for p in wanted[self.ranks[rank][1]]) * width, dtype=torch.uint8)
        dist.all_to_all_single(
            received,
            _bytes(array for parcel in parcels for array in parcel),
            [sum(tokens[p] for p in sent(source, rank)) * width for source in everyone],
            [sum(array.nbytes for array in parcel) for parcel in parcels],
            group=parallel.host_group("generation"),
        )
        order = [p for source in everyone for p in sent(source, rank)]
        parts = received.split([tokens[p] * width for p in order])
        arrays = (part.numpy().view(self.store.dtype) for part in parts)
        return {
            p: torch.from_numpy(array).view(tokens[p], own, self.store.chosen).short()
            for p, array in zip(order, arrays, strict=True)
        }

    def _owners(self, batch: Batch, keys: list[int]) -> list[int]:
        """Return the rank that has the routes of each sequence; -1 for a sequence without routes."""
        here = [dist.get_rank() if key in self.store.held else -1 for key in keys]
        owners = torch.tensor(here, dtype=torch.int32)
        dist.all_reduce(owners, dist.ReduceOp.MAX, group=parallel.host_group("generation"))
        lost = [p for p, (key, owner) in enumerate(zip(keys, owners.tolist(), strict=True)) if key >= 0 > owner]
        if lost:
            raise RunFailed(f"the routes of {len(lost)} of {len(batch)} sequences are on no rank, first of {lost[0]}")
        return owners.tolist()


def _bytes(arrays: Iterable[np.ndarray]) -> Tensor:
    parts = [torch.from_numpy(np.ascontiguousarray(array)).view(torch.uint8).flatten() for array in arrays]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
