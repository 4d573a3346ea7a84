"""A model on megatron-core that is trained, or computes log-probs, entropies and values of response tokens.

Its two main methods take a *global* ragged batch, which every rank has:

    outputs(batch, names)  forward only; [R] per name, complete on every rank
    step(batch, loss, ...) one optimizer step; the loss is a sum over micro-batches and ranks: `backward`, then `apply`

Both may use a second distribution over the same tokens (`Second`): its hidden states come from a separate forward pass
with other weights or other prompts, and stay on the ranks that need them.

Loss scaling. `loss` returns sums; `Loss.mean(counts)` divides them by counts of the whole global mini-batch. So the
gradient must be the *sum* over micro-batches and data- and context-parallel ranks. Megatron averages by default; with
calculate_per_token_loss=True its schedule and its DDP add up instead. `finalize_model_grads` would divide by a token
count, so it is not passed one.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_rft.config.gpu_defaults import overlaps
from megatron_rft.config.lora import Lora
from megatron_rft.conversion import Mapping
from megatron_rft.families.checks import whole_sequences
from megatron_rft.families.shapes import experts
from megatron_rft.families.towers import never_sampled
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, seams, weights
from megatron_rft.megatron.balance import plan, plan_within
from megatron_rft.megatron.images import Images
from megatron_rft.megatron.lora import attach
from megatron_rft.megatron.offload import TrainingState, drop_fp8_copies
from megatron_rft.megatron.optimizer import ActorOptimizer
from megatron_rft.megatron.packing import MicroBatch, PackLayout, filler, pack
from megatron_rft.megatron.routers import Routers
from megatron_rft.megatron.seams import named
from megatron_rft.megatron.spec import has_transformer_engine
from megatron_rft.megatron.torch_attention import take_rows
from megatron_rft.megatron.two_distributions import NAMES as COMPARED
from megatron_rft.megatron.two_distributions import Second, compare
from megatron_rft.megatron.vocabulary import logprobs_and_entropy
from megatron_rft.records import Batch, Support, send
from megatron_rft.utils.position import here

HEADS = COMPARED | {"values", "hidden"}
ALONE = frozenset({"logprobs", "entropy"})  # the rest of COMPARED needs a second distribution


class Actor:
    """A policy (or, with value_head, a critic) under any Megatron layout; frozen when `optimizer` is None.

    Args:
        hf_config: the transformers configuration of the model.
        megatron: the recipe's section `megatron` (layout, and fields of TransformerConfig and DDP).
        batching: the recipe's section `batching`: token budgets, packing, log-prob chunk.
        precision: fp32 | bf16 | fp8.
        temperature: of the sampler; log-probs are those of softmax(logits / temperature).
        optimizer: OptimizerConfig and schedule fields by Megatron's names, or None.
        total_steps: default length of the learning-rate schedule.
        value_head: compute values instead of log-probs.
        moments: names of additional sets of Adam's moments, which `step` can use.
        lora: train adapters (and a value head) of the frozen model, if given.
        trains_tower: train the vision tower too.
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
        lora: Lora | None = None,
        trains_tower: bool = False,
    ):
        self.hf_config, self.batching, self.temperature, self.value_head = hf_config, batching, temperature, value_head
        self.mapping, self.never = Mapping(hf_config), never_sampled(hf_config)
        self.forward_tokens = batching.tokens_without_backward  # in a micro-batch of a pass that is forward only
        self.models = models.build(
            hf_config, megatron, precision, value_head=value_head, trains_tower=trains_tower and optimizer is not None
        )
        self.images: Images | None = None
        self.streams: dict[tuple, weights.WeightStream] = {}
        self.lora = lora
        if lora is not None:
            attach(self.models, lora, hf_config)
        self.config = self.models[0].config
        chunks = self.models if precision == "fp32" else [Float16Module(self.config, m) for m in self.models]
        self.device = parallel.device()
        self.optimizer = None
        self.routers = Routers(self.models) if experts(hf_config) else None
        self.bias_update_rate = megatron.moe_router_bias_update_rate
        self.chunks = chunks
        if optimizer is not None:
            self.chunks = self._wrap(chunks, megatron, bool(optimizer.get("use_distributed_optimizer")))
            self.optimizer = ActorOptimizer(self.chunks, optimizer, precision, total_steps, moments)
            self.training_state = TrainingState(self.chunks, self.optimizer)
        # the chunks that gather parameters when a forward pass needs them
        wrapped = [chunk for chunk in self.chunks if isinstance(chunk, DistributedDataParallel)]
        self.gathering = [chunk for chunk in wrapped if chunk.ddp_config.overlap_param_gather]
        # whether this rank reports for its data-parallel share: the first rank of the last pipeline stage
        self.reports = parallel.is_last_stage() and parallel.tp_rank() == 0 and parallel.cp_rank() == 0
        # an interleaved pipeline requires that the count of micro-batches is a multiple of this
        self.count_multiple = parallel.pp_size() if len(self.chunks) > 1 else 1
        sequence_parallel = parallel.tp_size() if self.config.sequence_parallel else 1
        self.layout = PackLayout(
            cp_size=parallel.cp_size(),
            cp_rank=parallel.cp_rank(),
            total_multiple=sequence_parallel * models.token_multiple(self.config),
            packed=batching.pack_sequences,
            share_prompts=not batching.why_not_shared(parallel.cp_size(), whole_sequences(hf_config)),
            ends_on_host=not has_transformer_engine(),
        )
        seams.now.built(self)

    def _wrap(self, chunks: list, megatron: Any, distributed: bool) -> list[DistributedDataParallel]:
        options = {"grad_reduce_in_fp32": True} | models.fields_of(DistributedDataParallelConfig, megatron)
        options |= overlaps(megatron, distributed) if self.device.type == "cuda" else {}
        config = DistributedDataParallelConfig(**options, use_distributed_optimizer=distributed)
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

    def see(self, source: Any) -> None:
        """Compute prompts with images, which `source` has by their keys: `images.Images`."""
        token, merge = self.hf_config.image_token_id, self.hf_config.vision_config.spatial_merge_size
        self.images = Images(source, token, merge, parallel.pp_rank() == 0)

    # ---- weights

    @named(phase="loading", category="tensors of files")
    def load(self, lookup: Callable[[str], Tensor], adapters: bool = False) -> None:
        """Load all weights except adapters from HF-named tensors, or the adapters alone, and update the optimizer's
        main copies."""
        weights.load(self.models, lookup, self.mapping, adapters)
        if self.optimizer is not None:
            self.optimizer.megatron.reload_model_params()

    def stream(self, adapters: bool = False, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, full tensor) of every parameter in a fixed order, merged with its adapter (in `dtype`, if
        that is wider than the weight's), or of the adapters alone. Collective: every rank must exhaust it."""
        self.finish_param_gather()
        if (adapters, dtype) not in self.streams:
            self.streams[adapters, dtype] = weights.WeightStream(self.models, self.mapping, adapters, dtype)
        return iter(self.streams[adapters, dtype])

    def snapshot(self, frozen: bool = False) -> list[Tensor]:
        """Copy this rank's trained weights, or with `frozen` all of them, to host memory (pinned if there is a GPU),
        for `use_weights`."""
        self.finish_param_gather()
        return [self.pinned(p.detach().to("cpu", copy=True)) for p in self.tensors(frozen)]

    def pinned(self, copy: Tensor) -> Tensor:
        """Return a host tensor in memory that a GPU copies by itself."""
        return copy if self.device.type == "cpu" else copy.pin_memory()

    @contextmanager
    def use_weights(self, other: list[Tensor]) -> Iterator[None]:
        """Use the weights of a `snapshot` (a frozen reference) in this context, then restore the current ones
        exactly."""
        with named(phase="log-probs of another model", category="other weights"):
            self.finish_param_gather()
            mine = list(self.tensors())
            if len(mine) != len(other):
                mine = list(self.tensors(frozen=True))
            own = [p.data for p in mine]
            for p, data in zip(mine, other, strict=True):
                p.data = data.to(self.device, non_blocking=True).to(p.dtype)  # the device converts faster
        try:
            own_experts = self.routers.paused() if self.routers else nullcontext()
            with seams.now.other_weights(), own_experts:
                yield
        finally:
            for p, data in zip(mine, own, strict=True):
                p.data = data
            if self.config.fp8:
                drop_fp8_copies(self.chunks)  # also those of a teacher, which is idle now

    def tensors(self, frozen: bool = False) -> Iterable[Tensor]:
        """The parameters, and the buffers that belong to the model; of a model with adapters those that are trained,
        unless `frozen`."""
        every = (tensor for m in self.models for _, tensor in weights.own_tensors(m))
        return (tensor for tensor in every if frozen or self.lora is None or tensor.requires_grad)

    def finish_param_gather(self) -> None:
        """Finish a parameter gather that overlaps with the next forward pass. Collective. Call it before anything but a
        forward pass reads the weights."""
        for chunk in self.gathering:
            groups = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            if any(not g.param_gather_dispatched or g.param_gather_handle is not None for g in groups):
                chunk.start_param_sync(force_sync=True)

    # ---- forward

    @torch.no_grad()
    def outputs(self, batch: Batch, names: frozenset[str], second: Second | None = None) -> dict[str, Tensor]:
        """Return [R] float32 per name of `HEADS` (except "hidden"), on the host, the same on every rank."""
        compute = partial(self._outputs, batch, names, second)
        return seams.now.outputs(compute, names, len(batch.response_ids), critic=self.value_head)

    def _outputs(self, batch: Batch, names: frozenset[str], second: Second | None) -> dict[str, Tensor]:
        shares = self._plan(batch, self.forward_tokens)
        second_states = second and self._with_states(second, shares)
        order = sorted(names)

        def collect(out: dict[str, Tensor], micro: Batch) -> tuple[Tensor, Any]:
            values = torch.stack([out[name].float() for name in order])
            real = (micro.response_mask > 0).nonzero().flatten()  # a filler has no real tokens
            return values.new_zeros(()), (micro.tokens["number"][real], values[:, send(real, self.device)])

        lean = batch.only(set(), {"route"})
        results = self._run(lean, shares, collect, names, forward_only=True, second=second_states)
        full = torch.zeros(len(order), len(batch.response_ids), device=self.device)
        if self.reports:
            for number, values in results:
                full[:, send(number, self.device)] = values
        dist.all_reduce(full)  # one rank of each data-parallel share adds its tokens, the others add zeros
        return dict(zip(order, full.cpu(), strict=True))

    @torch.no_grad()
    def hidden_states(self, batch: Batch) -> Tensor | None:
        """Return [R, H] final hidden states of the response tokens, on the host; None on ranks that are not on the last
        pipeline stage. For small batches, because every rank gets all of it."""
        shares = self._plan(batch, self.forward_tokens)
        states = self._hidden_states(Second(batch), shares)
        if states is None:
            return None
        full = send(states.rows(torch.arange(len(batch.response_ids))), self.device)  # zeros for tokens of other ranks
        dist.all_reduce(full, group=parallel.dp_group())
        return full.cpu()

    def _with_states(self, second: Second, shares: list[list[Tensor]]) -> Second | None:
        if second.rows:
            return second
        if second.parts:
            return replace(second, parts=tuple(self._with_states(part, shares) for part in second.parts))
        return (second.actor or self)._hidden_states(second, shares)

    @torch.no_grad()
    @named(phase="second distribution")
    def _hidden_states(self, second: Second, shares: list[list[Tensor]]) -> Second | None:
        """Return `second` with the hidden states of the sequences that `shares` gives this data-parallel rank, computed
        with a separate split into micro-batches; None on ranks that are not on the last pipeline stage."""
        batch, budget = second.batch, self.forward_tokens
        mine = [torch.cat(share) for share in shares]
        mine = mine if second.only is None else [index[second.only[index]] for index in mine]
        cut = plan_within(batch, mine, budget, self.count_multiple, self.layout.share_prompts)

        def collect(out: dict[str, Tensor], micro: Batch) -> tuple[Tensor, Any]:
            real = micro.response_mask > 0
            return out["hidden"].new_zeros(()), (micro.tokens["number"][real], out["hidden"].cpu()[real])

        with self.use_weights(second.weights) if second.weights is not None else nullcontext():
            lean = batch.only(set(), set())
            results = self._run(lean, cut, collect, frozenset({"hidden"}), forward_only=True)
            if not parallel.is_last_stage():
                return None
            weight = models.output_weight(self.models[-1]).detach()
        numbers, states = (torch.cat(parts) for parts in zip(*results, strict=True))
        return second.with_states(numbers, states, weight)

    def backward(
        self,
        batch: Batch,
        loss: Callable[[dict[str, Tensor], Batch], Any],
        counts: dict[str, float],
        outputs: frozenset[str] = frozenset({"logprobs"}),
        second: Second | None = None,
    ) -> dict[str, float]:
        """Compute the gradient of a global mini-batch into the DDP buffers.

        `loss(outputs, micro_batch)` returns an object with `.mean(counts) -> scalar` and `.logged(counts) -> {name:
        scalar}` (megatron_rft.objectives.base.Loss): the micro-batch's shares. Returns their sums, and "loss". `counts`
        are those of `Update.computed`: `batch` may lack sequences without a gradient.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.megatron.zero_grad()
        shares = self._plan(batch, self.batching.micro_batch_tokens)
        second_states = second and self._with_states(second, shares)
        if self.lora and self.lora.dropout:
            torch.manual_seed(self._seed(batch))

        def differentiate(out: dict[str, Tensor], micro: Batch) -> tuple[Tensor, Any]:
            result = loss(out, micro)
            total = result.mean(counts)
            return total, {"loss": total.detach().clone(), **result.logged(counts)}

        parts = self._run(batch, shares, differentiate, outputs, forward_only=False, second=second_states)
        return self._add_up(parts if self.reports else [])

    def _seed(self, batch: Batch) -> int:
        """Return a function of the mini-batch, the optimizer steps so far, and the rank but for tensor parallelism: a
        resumed run drops the same inputs."""
        ranks = parallel.dp_rank(), parallel.pp_rank(), parallel.cp_rank()
        facts = f"{self.optimizer.schedule.num_steps} {ranks}".encode()
        return zlib.crc32(batch.response_ids.numpy().tobytes(), zlib.crc32(facts))

    def apply(
        self, computed: dict[str, float], learning_rate: float | None = None, moments: str = "own", scale: float = 1.0
    ) -> dict[str, float]:
        """Make one optimizer step with the gradient of `backward`, which returned `computed`; only forward passes came
        since. `learning_rate`: instead of the schedule's next rate. `scale`: positive factor of loss and gradient. It
        multiplies the finished gradient, so that a step does not depend on when the backward pass ran.

        Returns `computed` and "grad_norm", "learning_rate" and "skipped": 1 if the loss or the gradient was not finite;
        weights, moments and schedule then stay unchanged.
        """
        metrics = computed | {"loss": computed["loss"] * scale}
        finite = math.isfinite(metrics["loss"])
        if scale != 1.0:
            for chunk in self.chunks:
                chunk.scale_gradients(scale)
        applied, norm = self.optimizer.step(learning_rate, moments) if finite else (False, math.nan)
        if applied and self.routers:
            self.routers.trained(self.bias_update_rate)
        if self._forward_since_backward:  # Megatron gathers parameters once after each backward pass, and it has
            for chunk in self.gathering:
                chunk.start_param_sync(force_sync=True)
        rate = self.optimizer.learning_rate if learning_rate is None else learning_rate
        return {**metrics, "grad_norm": norm, "learning_rate": rate, "skipped": float(not applied)}

    def step(self, *given: Any, second: Second | None = None, **options: Any) -> dict[str, float]:
        """`backward` of what is `given`, and `apply` with the `options`."""
        return self.apply(self.backward(*given, second=second), **options)

    # ---- the schedule

    def _plan(self, batch: Batch, token_budget: int) -> list[list[Tensor]]:
        """Return [data-parallel rank][micro-batch] -> positions in `batch`."""
        return plan(batch, parallel.dp_size(), token_budget, self.count_multiple, self.layout.share_prompts)

    def _run(
        self,
        batch: Batch,
        shares: list[list[Tensor]],
        finish: Callable,
        names: frozenset[str],
        forward_only: bool,
        second: Second | None = None,
    ) -> list:
        """Run megatron-core's pipeline schedule over this rank's micro-batches of a plan. Returns the results of
        `finish` on the last stage. Micro-batches have the token field `number`: the index in the whole batch."""
        assert names <= HEADS, f"unknown model outputs: {sorted(names - HEADS)}"
        batch = batch.with_tokens(number=torch.arange(len(batch.response_ids)))
        routes = self.routers.of_shares(batch, shares) if self.routers else None
        micro_batches = [self._micro_batch(batch, index, routes) for index in shares[parallel.dp_rank()]]
        seams.now.packed(self.config, micro_batches, forward_only)
        if self.routers:
            self.routers.start(forward_only)

        def forward_step(data: Iterator[MicroBatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable]:
            micro = next(data)
            here.next_micro_batch()
            if self.routers:
                self.routers.begin(micro, self.config.sequence_parallel)
            options = {"fp32_output": False} if self.config.bf16 else {}  # hidden states stay in the model's precision
            hidden = chunk(micro.token_ids, None, None, packed_seq_params=micro.packed, **options)
            return hidden, partial(last_stage, micro)

        def last_stage(micro: MicroBatch, hidden: Tensor, **_: Any) -> tuple[Tensor, Tensor, Any]:
            value, kept = finish(self._heads(hidden, micro, names, second), micro.batch)
            return value, torch.zeros((), dtype=torch.int, device=self.device), kept  # no token count: see above

        self._forward_since_backward = forward_only
        for chunk in self.chunks:
            chunk.train(not forward_only)
        longest = max(m.token_ids.shape[1] for m in micro_batches)
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(micro_batches),
            seq_length=longest * parallel.cp_size(),
            micro_batch_size=micro_batches[0].token_ids.shape[0],
            forward_only=forward_only,
        )

    def _micro_batch(self, batch: Batch, index: Tensor, routes: dict[int, Tensor] | None) -> MicroBatch:
        """The sequences `index`, or if there are none a filler, whose tokens do not count. `routes`: by position in the
        batch, the experts to replay; None: the model has no routers."""
        if len(index):
            given = None if routes is None else [routes.get(position) for position in index.tolist()]
            return pack(batch.select(index), self.layout, self.device, given, self.images)
        micro = pack(filler(batch), self.layout, self.device, None if routes is None else [], self.images)
        return micro if micro.uses is None else replace(micro, uses=torch.zeros_like(micro.uses))

    def _heads(
        self, hidden: Tensor, micro: MicroBatch, names: frozenset[str], second: Second | None
    ) -> dict[str, Tensor]:
        """Hidden states [b, S, H] (1/tp of S with sequence parallelism) -> [R] per name, on every rank of the stage."""
        hidden = hidden.transpose(0, 1)  # [S, b, H], the model's layout
        if self.value_head:
            outputs = {"values": take_rows(hidden.reshape(-1), micro.rows).float()}
        else:
            if self.config.sequence_parallel:
                hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
            else:
                hidden = copy_to_tensor_model_parallel_region(hidden)
            rows = take_rows(hidden.reshape(-1, hidden.shape[-1]), micro.rows)
            outputs = {"hidden": rows} if names == {"hidden"} else self._distributions(rows, micro, names, second)
        # sorted, because a set of names has another order in each process, and these are collectives
        return {name: self._gather_context(outputs[name], micro) for name in sorted(outputs)}

    def _distributions(
        self, rows: Tensor, micro: MicroBatch, names: frozenset[str], second: Second | None
    ) -> dict[str, Tensor]:
        """[R_local, H] -> [R_local] per name."""
        weight, targets = models.output_weight(self.models[-1]), send(micro.targets, self.device)
        support = micro.support
        options = {
            "group": parallel.tp_group() if parallel.tp_size() > 1 else None,
            "vocab_size": self.hf_config.vocab_size,
            "temperature": self.temperature,
            "block_bytes": self.batching.logprob_block_mib << 20,
            "never": self.never,
            "support": support and Support(*(send(x, self.device) for x in support)),
        }
        if names <= ALONE:
            values = logprobs_and_entropy(rows, weight, targets, **options, with_entropy="entropy" in names)
            return {name: v for name, v in zip(("logprobs", "entropy"), values, strict=True) if v is not None}
        return self._compared(rows, micro, names, second, options)

    def _compared(
        self, rows: Tensor, micro: MicroBatch, names: frozenset[str], second: Second | None, options: dict[str, Any]
    ) -> dict[str, Tensor]:
        assert second is not None, f"{sorted(names - ALONE)} compare with a second distribution"
        numbers = micro.batch.tokens["number"][micro.kept]
        if second.parts:
            return self._by_part(rows, micro, names, [(part, part.of(numbers)) for part in second.parts])
        other = send(second.rows(numbers), self.device)
        options |= {"extrapolation": second.extrapolation, "mixture": second.mixture}
        weight, targets = models.output_weight(self.models[-1]), send(micro.targets, self.device)
        return compare(rows, weight, other, second.output_weight, targets, names=names, **options)

    def _by_part(
        self, rows: Tensor, micro: MicroBatch, names: frozenset[str], parts: list[tuple[Second, Tensor]]
    ) -> dict[str, Tensor]:
        """As `_distributions`, where each second distribution has its own tokens, positions in R_local."""
        parts = [(second, index) for second, index in parts if len(index)] or parts[:1]
        places = [send(index, self.device) for _, index in parts]
        outputs = [
            self._distributions(rows[place], micro.select(index), names, second)
            for place, (second, index) in zip(places, parts, strict=True)
        ]
        order = torch.cat(places).argsort()
        return {name: torch.cat([each[name] for each in outputs])[order] for name in names}

    def _gather_context(self, values: Tensor, micro: MicroBatch) -> Tensor:
        """Gather [R_local] of each context-parallel rank into [R] on all of them. Forward adds up; backward returns the
        local part, because each of these ranks computes the same loss and DDP adds their gradients later."""
        if parallel.cp_size() == 1:
            return values
        places = send(micro.kept, self.device)
        placed = values.new_zeros(len(micro.batch.response_ids), *values.shape[1:]).index_copy(0, places, values)
        return reduce_from_tensor_model_parallel_region(placed, group=parallel.cp_group())

    def _add_up(self, parts: list[dict[str, Tensor]]) -> dict[str, float]:
        """Sum the values of all micro-batches over all ranks. Only the last stage has names and values."""
        names = list(parts[0]) if parts else []
        every = [send(part[name].double(), self.device) for name in names for part in parts]
        values = torch.stack(every).view(len(names), -1).tolist() if every else []  # a single copy to the host
        own = {name: sum(each) for name, each in zip(names, values, strict=True)}
        gathered: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, own)
        reported = [g for g in gathered if g]
        return {name: sum(g[name] for g in reported) for name in reported[0]}
