"""Under torchrun: every family in every layout of this world size against transformers, in one job.

Writes an HF folder with weights of its own, lets transformers and megatron-core load it, and compares logits (a packed
and a padded micro-batch in one pipeline schedule) and the exported tensors. Prints one line per case.
"""

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.utils import logging

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host; first
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron_rft.conversion import FolderWriter, hf_shapes
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.spec import zigzag

SMALL = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0)
FAMILIES = {
    "llama": LlamaConfig(
        **SMALL,
        vocab_size=131,
        tie_word_embeddings=True,
        rope_parameters=LLAMA3 | dict(original_max_position_embeddings=32),
    ),
    "qwen2": Qwen2Config(**SMALL, vocab_size=129),
    "qwen3": Qwen3Config(**SMALL, vocab_size=128, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL,
        vocab_size=131,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}
LAYOUTS = {
    1: {"alone": {}},
    2: {
        "tp2": dict(tp=2),
        "tp2 sp": dict(tp=2, sp=True),
        "pp2": dict(pp=2),
        "pp2 vpp2": dict(pp=2, vpp=2),
        "cp2": dict(cp=2),
        "ep2": dict(ep=2),
    },
    4: {
        "tp2 pp2": dict(tp=2, pp=2),
        "tp2 sp pp2 vpp2": dict(tp=2, sp=True, pp=2, vpp=2),
        "tp2 sp cp2": dict(tp=2, sp=True, cp=2),
        "tp2 sp ep2 etp1": dict(tp=2, sp=True, ep=2, etp=1),
        "tp2 sp ep2": dict(tp=2, sp=True, ep=2),
        "pp2 ep2": dict(pp=2, ep=2),
    },
}
PACKED, PADDED = (16, 40, 8, 24), (3, 24)


def section(tp=1, pp=1, vpp=None, cp=1, ep=1, etp=None, sp=False, **extra):
    """A `megatron` section."""
    return SimpleNamespace(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        sequence_parallel=sp,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        fp8="hybrid",
        fp8_recipe="delayed",
        attention_backend="auto",
        model_extra=extra,
    )


def own_tensors(hf_config):
    """Weights large enough that a wrong one shows: logits of order 10."""
    generator = torch.Generator().manual_seed(1)
    for name, shape in hf_shapes(hf_config).items():
        noise = torch.randn(shape, generator=generator)
        yield name, 1 + 0.2 * noise if "norm" in name else 0.2 * noise


def write_folder(path, hf_config):
    if parallel.rank() == 0:
        writer = FolderWriter(path, shard_bytes=100_000)
        for name, tensor in own_tensors(hf_config):
            writer.add(name, tensor)
        writer.finish(hf_config, None)
    dist.barrier()


def micro_batches(vocab_size):
    """Token ids: one packed micro-batch [T] of sequences `PACKED`, one of equal sequences [b, s]."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, vocab_size, shape, generator=generator) for shape in ((sum(PACKED),), PADDED)]


@torch.no_grad()
def reference(path, packed, padded):
    """transformers' hidden states and logits of both micro-batches, sequences one by one: [T, V], [b, s, V]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return [torch.cat([model(ids[None]).logits for ids in packed.split(PACKED)], 1)[0], model(padded).logits]


def inputs(packed, padded):
    """What this rank feeds: (ids, position ids, packed_seq_params, positions held)."""
    size, rank = parallel.cp_size(), parallel.cp_rank()
    ends = torch.tensor([0, *PACKED]).cumsum(0)
    held = torch.cat([zigzag(n, size, rank) + start for n, start in zip(PACKED, ends.tolist(), strict=False)])
    positions = torch.cat([torch.arange(n) for n in PACKED])
    cu_seqlens = ends.to(torch.int32)
    params = PackedSeqParams("thd", cu_seqlens, cu_seqlens, None, None, max(PACKED), max(PACKED))
    yield packed[held][None], positions[held][None], params, held
    held = zigzag(PADDED[1], size, rank)
    yield padded[:, held], held.expand(PADDED[0], -1), None, held


def logits_of(hidden, chunk, vocab_size):
    """[b, s / tp, H] -> [b, s, V], gathered over tensor-parallel ranks."""
    if chunk.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden.transpose(0, 1).contiguous()).transpose(0, 1)
    part = hidden @ models.output_weight(chunk).T
    parts = [torch.empty_like(part) for _ in range(parallel.tp_size())]
    dist.all_gather(parts, part.contiguous(), group=parallel.tp_group())
    return torch.cat(parts, -1)[..., :vocab_size]


@torch.no_grad()
def run(chunks, batches, last_stage):
    """The pipeline schedule, forward only: what `last_stage(hidden, held)` gave for each micro-batch."""

    def forward_step(data, chunk):
        ids, positions, params, held = next(data)
        hidden = chunk(ids, positions, None, packed_seq_params=params)
        return hidden, partial(finish, held)

    def finish(held, hidden, **_):
        return hidden.new_zeros(()), torch.ones((), dtype=torch.int), {"out": last_stage(hidden, held), "held": held}

    iterators = [iter(batches) for _ in chunks]
    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(batches),
        seq_length=sum(PACKED),
        micro_batch_size=1,
        forward_only=True,
    )


def logits_difference(chunks, hf_config, ids, expected):
    found = run(chunks, list(inputs(*ids)), lambda hidden, _: logits_of(hidden, chunks[-1], hf_config.vocab_size))
    if not parallel.is_last_stage():
        return 0.0
    packed, padded = found
    return max(
        (packed["out"][0] - expected[0][packed["held"]]).abs().max().item(),
        (padded["out"] - expected[1][:, padded["held"]]).abs().max().item(),
    )


def export_differences(chunks, hf_config, folder):
    """HF names that are missing, repeated or not bit-identical in the stream."""
    wrong, seen = [], set()
    for name, tensor in weights.stream(chunks, hf_config):
        wrong += [name] if name in seen or not torch.equal(tensor, folder(name)) else []
        seen.add(name)
    return wrong + sorted(set(hf_shapes(hf_config)) ^ seen)


def reloads(path, hf_config, folder):
    """transformers finds nothing missing in what `save_folder` wrote, and the same tensors."""
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    clean = not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same = torch.equal(model.model.norm.weight, folder("model.norm.weight"))
    return clean and same and type(model).__name__ == hf_config.architectures[0]


def case(family, name, layout, root):
    hf_config = FAMILIES[family]
    megatron = section(**layout)
    parallel.initialize(megatron)
    chunks = models.build(hf_config, megatron, "fp32")
    path = root / family
    folder = weights.open_folder(path, hf_config)
    weights.load(chunks, folder, hf_config)
    ids = micro_batches(hf_config.vocab_size)
    difference = torch.tensor(logits_difference(chunks, hf_config, ids, reference(path, *ids)))
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    wrong = torch.tensor(len(export_differences(chunks, hf_config, folder)))
    dist.all_reduce(wrong)
    if name.startswith("tp2 pp2") or name == "ep2":
        out = root / f"{family}-{name}-out"
        weights.save_folder(weights.stream(chunks, hf_config), out, hf_config)
        hf_config.architectures = hf_config.architectures or [models.family_of(hf_config).architecture]
        wrong += 0 if reloads(out, hf_config, folder) else 1000
    if parallel.rank() == 0:
        print(f"CASE\t{family}\t{name}\t{difference.item():.3e}\t{wrong.item()}", flush=True)
    parallel.forget_layout()


def main():
    root = Path(sys.argv[1])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parallel.initialize(section())
    world = parallel.world_size()
    parallel.forget_layout()
    for family, hf_config in FAMILIES.items():
        write_folder(root / family, hf_config)
        for name, layout in LAYOUTS[world].items():
            mixture = hf_config.model_type == "qwen3_moe"
            if mixture and "tp" in layout and "sp" not in layout:
                layout, name = {**layout, "sp": True}, f"{name} (sp)"  # megatron-core wants it of a mixture
            if mixture or "ep" not in layout:
                case(family, name, layout, root)
    parallel.shutdown()


if __name__ == "__main__":
    main()
