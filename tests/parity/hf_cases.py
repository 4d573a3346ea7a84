"""Runs on several ranks: compares every family in every layout of this world size with transformers.

Writes an HF folder with weights of its own, lets transformers and megatron-core load it, and compares logits (a packed
and a padded micro-batch in one pipeline schedule) and the exported tensors. Prints one line per case.
"""

import sys
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.utils import logging

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.conversion import FolderWriter, Mapping, hf_shapes
from megatron_rft.families.tables import family_of
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.packing import zigzag
from tests.parity.layouts import shutdown
from tests.shapes import sizes

SMALL = sizes(4, 64, 4, 2, 96, head_dim=16)
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
        "pp2 ep2": dict(pp=2, ep=2),
    },
}
PACKED, PADDED = (36, 40, 8, 24), (3, 24)


def section(tp=1, pp=1, vpp=None, cp=1, ep=1, etp=None, sp=False, **extra):
    """A section `megatron`."""
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
        moe_router_bias_update_rate=0.0,
        fp8="hybrid",
        fp8_recipe="delayed",
        attention_backend="auto",
        model_extra=extra,
    )


def own_tensors(hf_config):
    """Weights large enough for logits of order 10, so that a wrong weight shows."""
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
    """transformers' logits and last hidden states of both micro-batches, sequences one by one: [T, .] and [b, s, .]."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    outs = [model(ids, output_hidden_states=True) for ids in (*(x[None] for x in packed.split(PACKED)), padded)]
    logits, hidden = [out.logits for out in outs], [out.hidden_states[-1] for out in outs]
    return [(torch.cat(values[:-1], 1)[0], values[-1]) for values in (logits, hidden)]


def inputs(packed, padded):
    """This rank's inputs: (ids, position ids, packed_seq_params, positions held)."""
    size, rank = parallel.cp_size(), parallel.cp_rank()
    ends = torch.tensor([0, *PACKED]).cumsum(0)
    held = zigzag(torch.tensor(PACKED), size, rank)
    positions = torch.cat([torch.arange(n) for n in PACKED])
    cu_seqlens = ends.to(torch.int32)
    params = PackedSeqParams("thd", cu_seqlens, cu_seqlens, None, None, max(PACKED), max(PACKED))
    here = parallel.device()
    yield packed[held][None].to(here), positions[held][None].to(here), params, held
    held = zigzag(torch.tensor([PADDED[1]]), size, rank)
    yield padded[:, held].to(here), held.expand(PADDED[0], -1).to(here), None, held


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
    """Run the pipeline schedule forward. Returns the results of `last_stage(hidden, held)` for each micro-batch."""

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


def difference(found, expected):
    """The largest difference over both micro-batches and all ranks of the last stage, on every rank."""
    worst = torch.zeros(())
    if parallel.is_last_stage():
        packed, padded = found
        worst = torch.maximum(
            (packed["out"][0].cpu() - expected[0][packed["held"]]).abs().max(),
            (padded["out"].cpu() - expected[1][:, padded["held"]]).abs().max(),
        )
    worst = worst.to(parallel.device())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def export_differences(chunks, hf_config, folder):
    """HF names that are missing, repeated or not bit-identical in the stream."""
    wrong, seen = [], set()
    for name, tensor in weights.WeightStream(chunks, Mapping(hf_config)):
        wrong += [name] if name in seen or not torch.equal(tensor.cpu(), folder(name)) else []
        seen.add(name)
    return wrong + sorted(set(hf_shapes(hf_config)) ^ seen)


def reloads(path, hf_config, folder):
    """Whether transformers loads the folder of `save_folder` without missing tensors and with equal ones."""
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    clean = not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same = torch.equal(model.model.norm.weight, folder("model.norm.weight"))
    return clean and same and type(model).__name__ == family_of(hf_config).architecture


def report(family, name, worst, wrong):
    count = torch.tensor(len(wrong), device=parallel.device())
    dist.all_reduce(count)
    if parallel.rank() == 0:
        print(f"CASE\t{family}\t{name}\t{worst:.3e}\t{count.item()}\t{wrong[:3]}", flush=True)


def policy(family, name, layout, path, ids, logits):
    hf_config, world = FAMILIES[family], dist.get_world_size()
    chunks = models.build(hf_config, section(**layout), "fp32")
    folder = weights.open_folder(path, hf_config)
    weights.load(chunks, folder, Mapping(hf_config))
    found = run(chunks, list(inputs(*ids)), lambda hidden, _: logits_of(hidden, chunks[-1], hf_config.vocab_size))
    worst, wrong = difference(found, logits), export_differences(chunks, hf_config, folder)
    if layout == list(LAYOUTS[world].values())[0]:
        out = path.with_name(f"{family}-out")
        weights.save_folder(weights.WeightStream(chunks, Mapping(hf_config)), out, hf_config)
        wrong += [] if reloads(out, hf_config, folder) else ["transformers reads another model"]
    report(family, name, worst, wrong)


def critic(family, name, layout, path, ids, hidden):
    """Checks that values equal the last hidden states times `score.weight` in any layout."""
    hf_config = FAMILIES[family]
    folder = weights.open_folder(path, hf_config)
    score = torch.randn(1, hf_config.hidden_size, generator=torch.Generator().manual_seed(3))
    chunks = models.build(hf_config, section(**layout), "fp32", value_head=True)
    weights.load(chunks, lambda name: score if name == "score.weight" else folder(name), Mapping(hf_config))
    found = run(chunks, list(inputs(*ids)), lambda values, _: values)
    exported = {name: tensor.clone().cpu() for name, tensor in weights.WeightStream(chunks, Mapping(hf_config))}
    expected = set(hf_shapes(hf_config)) - {"lm_head.weight"} | {"score.weight"}
    wrong = sorted(set(exported) ^ expected) + (
        [] if torch.equal(exported["score.weight"], score) else ["score.weight"]
    )
    report(family, name, difference(found, [h @ score[0] for h in hidden]), wrong)


def cases(world):
    """Yield (family, name, layout) of all comparisons on `world` ranks; a critic's beside its model's."""
    for family in FAMILIES:
        mixture = family == "qwen3_moe"
        for name, layout in LAYOUTS[world].items():
            if "ep" in layout and not mixture:
                continue
            if mixture and "tp" in layout:
                layout = {**layout, "sp": True}  # megatron-core wants it of a mixture
            yield family, name, layout
            if family == "qwen3" and ("sp" in layout or world == 1):
                yield family, f"critic {name}", layout


def main():
    root = Path(sys.argv[1])
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parallel.initialize(section())
    world = dist.get_world_size()
    for family, group in groupby(cases(world), key=itemgetter(0)):
        path, hf_config = root / family, FAMILIES[family]
        write_folder(path, hf_config)
        ids = micro_batches(hf_config.vocab_size)
        logits, hidden = reference(path, *ids)
        for _, name, layout in group:
            parallel.destroy_layout()
            parallel.initialize(section(**layout))
            if name.startswith("critic "):
                critic(family, name, layout, path, ids, hidden)
            else:
                policy(family, name, layout, path, ids, logits)
    shutdown()


if __name__ == "__main__":
    main()
