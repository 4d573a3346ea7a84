"""A model on megatron-core that can be trained and asked: log-probs, entropies and values of response tokens.

Two verbs, both on a *global* ragged batch that every rank holds:

    outputs(batch, names)  forward only; [R] per name, complete on every rank
    step(batch, loss, ...) one optimizer step; the loss is a sum over micro-batches and ranks

Either may look at a second distribution over the same tokens (`Second`): its hidden states come from a forward pass of
its own, in other weights or after other prompts, and stay on the ranks that need them.

Scaling, in one place. `loss` gives sums; `Loss.mean(counts)` divides them by counts of the whole global mini-batch. The
gradient wanted is therefore the plain *sum* over micro-batches and data- and context-parallel ranks. Megatron would
average: with calculate_per_token_loss=True its schedule and its DDP add up instead, and the division by tokens that
`finalize_model_grads` would make is left out by not passing it a token count.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.balance import plan, plan_within
from megatron_rft.megatron.logprobs import logprobs_and_entropy
from megatron_rft.megatron.optimizer import Optimizer
from megatron_rft.megatron.packing import Layout, MicroBatch, filler, pack
from megatron_rft.megatron.second_distribution import HiddenStates, Recorded, Second
from megatron_rft.megatron.shared_attention import take_rows
from megatron_rft.megatron.two_distributions import NAMES as COMPARED
from megatron_rft.megatron.two_distributions import compare
from megatron_rft.records import Batch, take_segments

HEADS = COMPARED | {"values", "hidden"}
ALONE = frozenset({"logprobs", "entropy"})  # what one distribution gives; the rest of COMPARED takes a second one


class Actor:
    """A policy (or, with value_head, a critic) under any Megatron layout; frozen when `optimizer` is None.

    Args:
        hf_config: the transformers configuration of the model.
        megatron: the recipe's section of that name (layout and TransformerConfig / DDP fields).
        batching: the recipe's section: token budgets, packing, log-prob chunk.
        precision: fp32 | bf16 | fp8.
        temperature: the sampler's; log-probs are those of softmax(logits / temperature).
        optimizer: OptimizerConfig and schedule fields by Megatron's names, or None.
        total_steps: length of the learning-rate schedule where it does not say.
        value_head: values instead of log-probs.
        moments: names of more sets of Adam's moments, for steps that name one.
    """

    def __init__(
        self,
        hf_config: Any,
        megatron: Any,
        batching: Any,
        precision: str,
        *,
        temperature: float = 1.0,
        optimizer: dict[str, Any] | None = None,
        total_steps: int = 1,
        value_head: bool = False,
        moments: tuple[str, ...] = (),
    ):
        self.hf_config, self.batching, self.temperature, self.value_head = hf_config, batching, temperature, value_head
        self.models = models.build(hf_config, megatron, precision, value_head=value_head)
        self.config = self.models[0].config
        chunks = self.models if precision == "fp32" else [Float16Module(self.config, m) for m in self.models]
        self.device = parallel.device()
        self.optimizer = None
        self.chunks = chunks
        if optimizer is not None:
            self.chunks = self._wrap(chunks, megatron, bool(optimizer.get("use_distributed_optimizer")))
            self.optimizer = Optimizer(self.chunks, optimizer, precision, total_steps, moments)
        sequence_parallel = parallel.tp_size() if self.config.sequence_parallel else 1
        self.layout = Layout(
            cp_size=parallel.cp_size(),
            cp_rank=parallel.cp_rank(),
            total_multiple=sequence_parallel * models.token_multiple(self.config),
            packed=batching.pack_sequences,
            share_prompts=not batching.why_not_shared(parallel.cp_size()),
        )

    def _wrap(self, chunks: list, megatron: Any, distributed: bool) -> list[DistributedDataParallel]:
        options = models.fields_of(DistributedDataParallelConfig, megatron)
        config = DistributedDataParallelConfig(
            **{"grad_reduce_in_fp32": True, **options}, use_distributed_optimizer=distributed
        )
        wrap = partial(DistributedDataParallel, self.config, config)
        wrapped = [wrap(chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)]
        self.config.finalize_model_grads_func = lambda model, _tokens, **kw: finalize_model_grads(model, None, **kw)
        one = len(wrapped) == 1
        self.config.no_sync_func = wrapped[0].no_sync if one else [m.no_sync for m in wrapped]
        if config.overlap_grad_reduce and not one:
            self.config.grad_sync_func = [m.start_grad_sync for m in wrapped]
        if config.overlap_param_gather and config.align_param_gather:
            self.config.param_sync_func = wrapped[0].start_param_sync if one else [m.start_param_sync for m in wrapped]
        return wrapped

    # ---- weights

    def load(self, lookup: Callable[[str], Tensor]) -> None:
        """All weights from HF-named tensors; the optimizer's main copies follow."""
        weights.load(self.models, lookup, self.hf_config)
        if self.optimizer is not None:
            self.optimizer.megatron.reload_model_params()

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor) of every parameter, on every rank, in a fixed order. Every rank must exhaust it."""
        self._settle()
        return weights.stream(self.models, self.hf_config)

    def snapshot(self) -> list[Tensor]:
        """A copy of this rank's weights in host memory (pinned beside a GPU), for `use_weights`."""
        self._settle()
        copies = [p.detach().to("cpu", copy=True) for p in self._parameters()]
        return copies if self.device.type == "cpu" else [copy.pin_memory() for copy in copies]

    @contextmanager
    def use_weights(self, other: list[Tensor]) -> Iterator[None]:
        """Run with the weights of a `snapshot` (the frozen reference), then with our own again, bit for bit."""
        self._settle()
        own = [p.data for p in self._parameters()]
        for p, data in zip(self._parameters(), other, strict=True):
            p.data = data.to(self.device, p.dtype, non_blocking=True)
        try:
            yield
        finally:
            for p, data in zip(self._parameters(), own, strict=True):
                p.data = data

    def _parameters(self) -> Iterable[torch.nn.Parameter]:
        return (p for m in self.models for p in m.parameters())

    def _settle(self) -> None:
        """Finish a parameter gather that overlaps with the next forward pass."""
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    # ---- forward

    @torch.no_grad()
    def outputs(
        self, batch: Batch, names: frozenset[str], second: Second | Recorded | None = None
    ) -> dict[str, Tensor]:
        """[R] float32 per name of `HEADS` (but "hidden"), on the host and the same on every rank."""
        shares = self._plan(batch, self.batching.tokens_without_backward)
        second_states = second and self._second_states(second, shares)
        order = sorted(names)

        def collect(out: dict[str, Tensor], micro: Batch) -> tuple[Tensor, Any]:
            values = torch.stack([out[name].float() for name in order])
            real = micro.response_mask > 0  # none of a filler's
            return values.new_zeros(()), (micro.tokens["number"][real], values[:, real.to(values.device)])

        mine = shares[parallel.dp_rank()]
        found = self._run(
            _numbered(batch.only(set(), set())), mine, collect, names, forward_only=True, second_states=second_states
        )
        full = torch.zeros(len(order), len(batch.response_ids), device=self.device)
        if self._reports():
            for number, values in found:
                full[:, number.to(self.device)] = values
        dist.all_reduce(full)  # one rank of each data-parallel share adds its tokens, the others add zeros
        return dict(zip(order, full.cpu(), strict=True))

    @torch.no_grad()
    def hidden_states(self, batch: Batch) -> Tensor | None:
        """[R, H] final hidden states of the response tokens, on the host; None where this rank's pipeline stage has
        none. Small batches: every rank holds all of it."""
        shares = self._plan(batch, self.batching.tokens_without_backward)
        found = self._hidden_states(Second(batch), shares)
        if found is None:
            return None
        full = found.rows[found.place].to(self.device)  # zeros where another rank has them
        dist.all_reduce(full, group=parallel.dp_group())
        return full.cpu()

    def _second_states(self, second: Second | Recorded, shares: list[list[Tensor]]) -> HiddenStates | None:
        if isinstance(second, Second):
            return self._hidden_states(second, shares)
        if not parallel.is_last_stage():
            return None
        numbers = torch.arange(len(second.batch.response_ids))
        mine = take_segments(numbers, second.batch.response_lens, torch.cat(shares[parallel.dp_rank()]))
        return HiddenStates.of(second.batch, mine, second.rows(mine), second.weight, second.extrapolation)

    @torch.no_grad()
    def _hidden_states(self, second: Second, shares: list[list[Tensor]]) -> HiddenStates | None:
        """Of the sequences that `shares` gives each data-parallel rank, cut into micro-batches of their own. None where
        this rank is not on the last pipeline stage."""
        batch, budget = second.batch, self.batching.tokens_without_backward
        mine = [torch.cat(share) for share in shares]
        cut = plan_within(batch, mine, budget, self._count_multiple(), self.layout.share_prompts)

        def collect(out: dict[str, Tensor], micro: Batch) -> tuple[Tensor, Any]:
            real = micro.response_mask > 0
            return out["hidden"].new_zeros(()), (micro.tokens["number"][real], out["hidden"].cpu()[real])

        with self.use_weights(second.weights) if second.weights is not None else nullcontext():
            numbered = _numbered(batch.only(set(), set()))
            found = self._run(numbered, cut[parallel.dp_rank()], collect, frozenset({"hidden"}), forward_only=True)
            if not parallel.is_last_stage():
                return None
            weight = models.output_weight(self.models[-1]).detach()
        numbers = torch.cat([number for number, _ in found])
        rows = torch.cat([rows for _, rows in found])
        return HiddenStates.of(batch, numbers, rows, weight, second.extrapolation)

    def backward(
        self,
        batch: Batch,
        loss: Callable[[dict[str, Tensor], Batch], Any],
        counts: dict[str, float],
        outputs: frozenset[str] = frozenset({"logprobs"}),
        second: Second | Recorded | None = None,
    ) -> dict[str, float]:
        """The gradient of a global mini-batch, into the DDP buffers.

        `loss(outputs, micro_batch)` returns an object with `.mean(counts) -> scalar` and `.logged() -> {name: sum}`
        (megatron_rft.objectives.base.Loss). Returns their means over the mini-batch, and "loss".
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        shares = self._plan(batch, self.batching.micro_batch_tokens)
        second_states = second and self._second_states(second, shares)
        numbered = batch if second is None else _numbered(batch)

        def differentiate(out: dict[str, Tensor], micro: Batch) -> tuple[Tensor, Any]:
            result = loss(out, micro)
            total = result.mean(counts)
            logged = {name: entry.total.detach() / counts[entry.per] for name, entry in result.logged().items()}
            return total, {"loss": total.detach().clone(), **logged}

        mine = shares[parallel.dp_rank()]
        parts = self._run(numbered, mine, differentiate, outputs, forward_only=False, second_states=second_states)
        return self._add_up(parts if self._reports() else [])

    def step(
        self,
        batch: Batch,
        loss: Callable[[dict[str, Tensor], Batch], Any],
        counts: dict[str, float],
        outputs: frozenset[str] = frozenset({"logprobs"}),
        learning_rate: float | None = None,
        second: Second | Recorded | None = None,
        moments: str = "own",
    ) -> dict[str, float]:
        """One optimizer step on a global mini-batch, at `learning_rate` or at the schedule's next.

        Returns what `backward` does and "grad_norm", "learning_rate" and "skipped": 1 where the loss or the gradient
        was not finite, and weights, moments and schedule stayed as they were.
        """
        metrics = self.backward(batch, loss, counts, outputs, second)
        finite = math.isfinite(metrics["loss"])
        applied, norm = self.optimizer.step(learning_rate, moments) if finite else (False, math.nan)
        rate = self.optimizer.learning_rate if learning_rate is None else learning_rate
        return {**metrics, "grad_norm": norm, "learning_rate": rate, "skipped": float(not applied)}

    # ---- the schedule

    def _plan(self, batch: Batch, token_budget: int) -> list[list[Tensor]]:
        """[data-parallel rank][micro-batch] -> positions in `batch`."""
        return plan(batch, parallel.dp_size(), token_budget, self._count_multiple(), self.layout.share_prompts)

    def _run(
        self,
        batch: Batch,
        share: list[Tensor],
        finish: Callable,
        names: frozenset[str],
        forward_only: bool,
        second_states: HiddenStates | None = None,
    ) -> list:
        """megatron-core's pipeline schedule over this rank's micro-batches; what `finish` gave, on the last stage."""
        assert names <= HEADS, f"unknown model outputs: {sorted(names - HEADS)}"
        parts = [batch.select(index) if len(index) else filler(batch) for index in share]
        micro_batches = [pack(part, self.layout, self.device) for part in parts]

        def forward_step(data: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable]:
            micro = next(data)
            options = {"fp32_output": False} if self.config.bf16 else {}  # hidden states stay in the model's precision
            hidden = chunk(micro.token_ids, micro.position_ids, None, packed_seq_params=micro.packed, **options)
            return hidden, partial(last_stage, micro)

        def last_stage(micro: MicroBatch, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor, Any]:
            value, kept = finish(self._heads(hidden, micro, names, second_states), micro.batch)
            return value, torch.zeros((), dtype=torch.int, device=self.device), kept  # no token count, see the header

        for chunk in self.chunks:
            chunk.train(not forward_only)
        longest = max(m.token_ids.shape[1] for m in micro_batches)
        iterators = [iter(micro_batches) for _ in self.chunks]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=longest * parallel.cp_size(),
            micro_batch_size=micro_batches[0].token_ids.shape[0],
            forward_only=forward_only,
        )

    def _heads(
        self, hidden: Tensor, micro: MicroBatch, names: frozenset[str], second_states: HiddenStates | None
    ) -> dict[str, Tensor]:
        """Hidden states [b, S, H] (1/tp of S with sequence parallelism) -> [R] per name, on every rank of the stage."""
        hidden = hidden.transpose(0, 1)  # [S, b, H], as the model holds it
        if self.value_head:
            found = {"values": take_rows(hidden.reshape(-1), micro.rows).float()}
        else:
            if self.config.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
            else:
                hidden = copy_to_tensor_model_parallel_region(hidden)
            rows = take_rows(hidden.reshape(-1, hidden.shape[-1]), micro.rows)
            found = {"hidden": rows} if names == {"hidden"} else self._distributions(rows, micro, names, second_states)
        return {name: self._whole(value, micro) for name, value in found.items()}

    def _distributions(
        self, rows: Tensor, micro: MicroBatch, names: frozenset[str], second_states: HiddenStates | None
    ) -> dict[str, Tensor]:
        """[R_local, H] -> [R_local] per name."""
        weight, targets = models.output_weight(self.models[-1]), micro.targets
        options = {
            "group": parallel.tp_group() if parallel.tp_size() > 1 else None,
            "vocab_size": self.hf_config.vocab_size,
            "temperature": self.temperature,
            "block_bytes": self.batching.logprob_block_mib << 20,
        }
        if names <= ALONE:
            values = logprobs_and_entropy(rows, weight, targets, **options, with_entropy="entropy" in names)
            return {name: v for name, v in zip(("logprobs", "entropy"), values, strict=True) if v is not None}
        assert second_states is not None, f"{sorted(names - ALONE)} compare with a second distribution"
        place = second_states.place[micro.batch.tokens["number"][micro.kept.cpu()]]
        other = second_states.rows[place].to(self.device)
        options["extrapolation"] = second_states.extrapolation
        return compare(rows, weight, other, second_states.weight, targets, names=names, **options)

    def _whole(self, values: Tensor, micro: MicroBatch) -> Tensor:
        """[R_local] of one context-parallel rank -> [R] on each. Forward adds up, backward takes one's own part: each
        of these ranks computes the same loss, and their gradients are added later like data-parallel ones."""
        if parallel.cp_size() == 1:
            return values
        placed = values.new_zeros(len(micro.batch.response_ids), *values.shape[1:]).index_copy(0, micro.kept, values)
        return reduce_from_tensor_model_parallel_region(placed, group=parallel_state.get_context_parallel_group())

    def _count_multiple(self) -> int:
        """Interleaved pipelines want a multiple of the pipeline's length."""
        return parallel.pp_size() if len(self.chunks) > 1 else 1

    def _reports(self) -> bool:
        """One rank speaks for each data-parallel share: on the last pipeline stage, first of its other groups."""
        return parallel.is_last_stage() and parallel.tp_rank() == 0 and parallel.cp_rank() == 0

    def _add_up(self, parts: list[dict[str, Tensor]]) -> dict[str, float]:
        """The sums of all micro-batches of all ranks, on every rank. Names are known on the last stage only."""
        own = {name: sum(part[name].double().item() for part in parts) for name in (parts[0] if parts else {})}
        gathered: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, own)
        spoken = [g for g in gathered if g]
        return {name: sum(g[name] for g in spoken) for name in spoken[0]}


def _numbered(batch: Batch) -> Batch:
    """Each response token knows its number in the whole batch."""
    return batch.with_tokens(number=torch.arange(len(batch.response_ids)))
