"""What the rehearsal puts in place of code that needs values or neighbours: the package's seams (megatron/seams.py),
and patches of megatron-core.

They name phases, parts and categories for the ledger, answer with the shapes that pipeline neighbours would send, and
balance the routing of a mixture.
"""

import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe import router
from torch import Tensor

from megatron_rft.conversion import hf_shapes
from megatron_rft.megatron import parallel, seams
from megatron_rft.megatron.seams import Seams
from megatron_rft.rehearsal.device import FakeDevice
from megatron_rft.rehearsal.ledger import Ledger


def install(ledger: Ledger, mode: FakeDevice, training_only: bool) -> None:
    seams.now = ShapeSeams(ledger, mode, training_only)
    around(schedules, "forward_step", lambda *_, **__: ledger.doing("forward"))
    around(schedules, "backward_step", lambda *_, **__: ledger.doing("backward"))
    around(P2PCommunicator, "_communicate", lambda *_, **__: ledger.holding("activations"))
    _neighbours(seams.now)
    _balanced_routing(mode)


def around(owner: Any, name: str, context: Callable[..., AbstractContextManager]) -> None:
    """Run calls of `owner.name` inside `context(*arguments)`."""
    plain = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        with context(*args, **kwargs):
            return plain(*args, **kwargs)

    setattr(owner, name, call)


class ShapeSeams(Seams):
    """Names for the ledger; and acts on shapes."""

    def __init__(self, ledger: Ledger, mode: FakeDevice, training_only: bool):
        """`training_only`: log-probs and values that the run computes before its updates are zeros."""
        self.ledger, self.mode, self.training_only = ledger, mode, training_only
        self.swapped = False  # whether another model's weights replace the policy's
        self.shapes: dict[str, list[list[int]]] = {"before": [], "behind": []}  # that neighbours will send

    @contextmanager
    def named(self, phase: str = "", part: str = "", category: str = "") -> Iterator[None]:
        contexts = ((self.ledger.during, phase), (self.ledger.doing, part), (self.ledger.holding, category))
        with ExitStack() as stack:
            for context, name in contexts:
                if name:
                    stack.enter_context(context(name))
            yield

    @contextmanager
    def other_weights(self) -> Iterator[None]:
        before, self.swapped = self.swapped, True
        yield
        self.swapped = before

    def built(self, actor: Any) -> None:
        """Count the storages of the model's weights and gradients under these categories."""
        self.mode.relabel(actor.tensors(frozen=True), "weights")
        chunks = actor.chunks if actor.optimizer else []  # a teacher has no gradients
        buffers = [b for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
        self.mode.relabel([b.grad_data for b in buffers], "gradients")

    def packed(self, config: Any, micro_batches: list, forward_only: bool) -> None:
        """Every pipeline stage has micro-batches of the same shapes."""
        ledger, cut = self.ledger, parallel.tp_size() if config.sequence_parallel else 1
        ids = [micro.token_ids for micro in micro_batches]
        for shapes in self.shapes.values():
            shapes[:] = [[x.shape[1] // cut, x.shape[0], config.hidden_size] for x in ids]
        ledger.training = not forward_only
        ledger.tokens[ledger.phase] += sum(x.numel() for x in ids)
        ledger.largest[ledger.phase] = max(ledger.largest[ledger.phase], *(x.numel() for x in ids))
        ledger.micro_batches[ledger.phase] += len(ids)

    def next_shape(self, where: str) -> list[int]:
        shapes = self.shapes[where]
        alike = all(shape == shapes[0] for shape in shapes)  # if so, the order of virtual stages does not matter
        return shapes[0] if alike else shapes.pop(0)

    def outputs(self, compute: Callable[[], dict], names: frozenset[str], size: int, critic: bool) -> dict[str, Tensor]:
        if self.training_only:
            return dict.fromkeys(names, torch.zeros(size))
        what = "critic's values" if critic else "log-probs of another model" if self.swapped else "log-probs"
        with self.ledger.during(what):
            return compute()

    def open_folder(self, path: str | Path, hf_config: Any) -> Callable[[str], Tensor]:
        return self._without_values(hf_shapes(hf_config), getattr(hf_config, "dtype", None) or torch.bfloat16)

    def new_tensors(self, lookup: Callable[[str], Tensor], shapes: dict[str, tuple]) -> Callable[[str], Tensor]:
        return self._without_values(shapes, torch.float32)

    def _without_values(self, shapes: dict[str, tuple], dtype: torch.dtype) -> Callable[[str], Tensor]:
        """A lookup of host tensors that have no values."""
        return lambda name: self.mode.made(lambda: torch.empty(shapes[name], dtype=dtype))

    def save(self, storage: Any, copy: list[Tensor] | None) -> list[Tensor]:
        if copy is None:
            self.ledger.host.add("optimizer", storage.nbytes())
        return []

    def empty(self, storage: Any) -> None:
        self._count(storage, -1)

    def refill(self, storage: Any, size: int, copy: list[Tensor] | None) -> None:
        self._count(storage, 1)

    def _count(self, storage: Any, sign: int) -> None:
        memory, category, size = self.mode.storages[storage]
        memory.add(category, sign * size)


def _neighbours(shapes: ShapeSeams) -> None:
    """Answer with the shapes that this rank's neighbours would send."""
    plain = P2PCommunicator._communicate_shapes

    def communicate_shapes(self: Any, to_next: Any, to_previous: Any, recv_prev: bool, recv_next: bool) -> tuple:
        plain(self, to_next, to_previous, recv_prev, recv_next)
        nothing = [0, 0, 0]
        before = shapes.next_shape("before") if recv_prev else nothing
        return before, shapes.next_shape("behind") if recv_next else nothing

    P2PCommunicator._communicate_shapes = communicate_shapes


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
