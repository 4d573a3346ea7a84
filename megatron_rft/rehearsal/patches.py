"""Patches of the package and of megatron-core that supply what shapes do not tell.

They name phases, parts and categories for the ledger, answer with the shapes that pipeline neighbours would send, and
balance the routing of a mixture.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe import moe_utils, router
from torch import Tensor

from megatron_rft.megatron import actor as actors
from megatron_rft.megatron import offload, parallel, torch_attention, vocabulary
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.optimizer import ActorOptimizer
from megatron_rft.rehearsal.cuda import LowerRight
from megatron_rft.rehearsal.device import FakeDevice
from megatron_rft.rehearsal.ledger import Ledger


def install(ledger: Ledger, mode: FakeDevice) -> None:
    _name_parts(ledger)
    _name_categories(ledger)
    _name_phases(ledger)
    _neighbours(ledger)
    _balanced_routing(mode)
    torch_attention.causal_lower_right = LowerRight
    _offload(ledger, mode)


def no_outputs() -> None:
    """Answer with zeros where the run computes log-probs and values before its updates."""
    Actor.outputs = lambda self, batch, names, second=None: dict.fromkeys(names, torch.zeros(len(batch.response_ids)))


def around(owner: Any, name: str, context: Callable[..., AbstractContextManager]) -> None:
    """Run calls of `owner.name` inside `context(*arguments)`."""
    plain = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with context(*args, **kwargs):
            return plain(*args, **kwargs)

    setattr(owner, name, call)


def _name_parts(ledger: Ledger) -> None:
    around(schedules, "forward_step", lambda *_, **__: ledger.doing("forward"))
    around(schedules, "backward_step", lambda *_, **__: ledger.doing("backward"))
    around(ActorOptimizer, "step", lambda *_, **__: ledger.doing("optimizer"))


def _name_categories(ledger: Ledger) -> None:
    around(vocabulary.Blocks, "buffer", lambda *_, **__: ledger.holding("log-prob blocks"))
    around(actors, "compare", lambda *_, **__: ledger.holding("second distribution"))
    around(P2PCommunicator, "_communicate", lambda *_, **__: ledger.holding("activations"))
    plain = Actor.use_weights

    @contextmanager
    def swapped(self: Actor, other: list[Tensor]) -> Iterator[None]:
        with ExitStack() as stack:
            with ledger.during("log-probs of another model"), ledger.holding("other weights"):
                stack.enter_context(plain(self, other))
            ledger.swapped += 1
            stack.callback(lambda: setattr(ledger, "swapped", ledger.swapped - 1))
            yield

    Actor.use_weights = swapped


def _name_phases(ledger: Ledger) -> None:
    def of_outputs(self: Actor, *_: Any, **__: Any) -> AbstractContextManager:
        what = "critic's values" if self.value_head else "log-probs of another model" if ledger.swapped else "log-probs"
        return ledger.during(what)

    around(Actor, "outputs", of_outputs)
    around(Actor, "_hidden_states", lambda *_, **__: ledger.during("second distribution"))


def _neighbours(ledger: Ledger) -> None:
    """Answer with the shapes of this rank's micro-batches: every pipeline stage has the same ones."""
    received: dict[str, list[list[int]]] = {"before": [], "behind": []}
    plain_pack, plain_run, plain_shapes = actors.pack, Actor._run, P2PCommunicator._communicate_shapes
    configs: list[Any] = []

    def pack(*args: Any, **kwargs: Any) -> Any:
        micro = plain_pack(*args, **kwargs)
        cut = parallel.tp_size() if configs[-1].sequence_parallel else 1
        shape = [micro.token_ids.shape[1] // cut, micro.token_ids.shape[0], configs[-1].hidden_size]
        for shapes in received.values():
            shapes.append(shape)
        ledger.tokens[ledger.phase] += micro.token_ids.numel()
        ledger.largest[ledger.phase] = max(ledger.largest[ledger.phase], micro.token_ids.numel())
        ledger.micro_batches[ledger.phase] += 1
        return micro

    def run(self: Actor, *args: Any, **kwargs: Any) -> Any:
        for shapes in received.values():
            shapes.clear()
        configs[:] = [self.config]
        ledger.training = not kwargs["forward_only"]
        return plain_run(self, *args, **kwargs)

    def next_of(where: str) -> list[int]:
        shapes = received[where]
        alike = all(shape == shapes[0] for shape in shapes)  # if so, the order of virtual stages does not matter
        return shapes[0] if alike else shapes.pop(0)

    def communicate_shapes(self: Any, to_next: Any, to_previous: Any, recv_prev: bool, recv_next: bool) -> tuple:
        plain_shapes(self, to_next, to_previous, recv_prev, recv_next)
        nothing = [0, 0, 0]
        return next_of("before") if recv_prev else nothing, next_of("behind") if recv_next else nothing

    actors.pack, Actor._run, P2PCommunicator._communicate_shapes = pack, run, communicate_shapes


def _offload(ledger: Ledger, mode: FakeDevice) -> None:
    """Report the sizes of storages to the ledger instead of copying them."""

    def save(storage: Any, copy: Tensor | None) -> Tensor:
        if copy is None:
            ledger.host.add("optimizer", storage.nbytes())
        return torch.empty(0) if copy is None else copy

    def count(storage: Any, sign: int) -> None:
        memory, category, size = mode.storages[storage]
        memory.add(category, sign * size)

    offload.save, offload.empty = save, lambda storage: count(storage, -1)
    offload.refill = lambda storage, *_: count(storage, 1)


def _balanced_routing(mode: FakeDevice) -> None:
    """Send token t to the experts k t, k t + 1, ...; the probabilities have shapes only."""
    plain_routing = router.TopKRouter.routing

    def routing(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probabilities, chosen = plain_routing(self, *args, **kwargs)
        tokens, experts = chosen.shape
        first = torch.arange(tokens)[:, None] * self.topk
        balanced = torch.zeros(tokens, experts, dtype=torch.bool)
        mode.shadows[chosen] = balanced.scatter_(1, (first + torch.arange(self.topk)) % experts, True)
        return probabilities, chosen

    def empty(*size: Any, **options: Any) -> Tensor:
        return torch.empty(*size, **{"device": "cuda", **options})

    router.TopKRouter.routing = routing
    # megatron-core makes the router's weight on the host, and `.data =` of a host tensor to a device's fails on shapes
    router.torch = types.ModuleType("torch")
    router.torch.__dict__.update(vars(torch), empty=empty)
    vars(moe_utils).setdefault("te_general_gemm", None)  # megatron-core 0.16.1 without TE: else a NameError, GPU or not
