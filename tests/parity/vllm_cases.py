"""Runs on two ranks: compares vLLM's output after each of SYNCS syncs from actors in three layouts with transformers.

    vllm_cases.py FOLDER SYNCS PLACEMENT/FAMILY/tied|untied ...

As in a run every rank has an engine of its own (`colocated`), both ranks are one engine (`together`; `apart`, if each
of them has experts of its own), or rank 0 has one in a process or behind a server: it gets the weights of all layouts.
Rank 0 compares. Greedy tokens are transformers' where each has its largest log-prob, given the tokens before it. Prints
one line per sync.
"""

import gc
import random
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Olmo3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.utils import logging

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.conversion import Mapping, hf_shapes
from megatron_rft.families.shapes import experts
from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Request, Sampling, checksum
from megatron_rft.inference.hf.engine import hf_views
from megatron_rft.inference.pool import EnginePool
from megatron_rft.inference.process import EngineProcess
from megatron_rft.inference.vllm.engine import VLLMEngine
from megatron_rft.inference.vllm.server_process import LocalServer
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, weights
from tests.families import SIGMOID
from tests.parity.hf_cases import section
from tests.shapes import sizes

SHAPE = sizes(2, 128, 4, 2, 96, vocab_size=130, max_position_embeddings=256)
FAMILIES = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig, "experts": Qwen3MoeConfig}
FAMILIES |= {"mistral": MistralConfig, "glm4_moe": Glm4MoeConfig, "gemma3": Gemma3TextConfig}
FAMILIES |= {"olmo2": Olmo2Config, "olmo3": Olmo3Config}
TOGETHER = {"together": {}, "apart": {"enable_expert_parallel": True}}
EXPERTS = dict(head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1])
WINDOWS = dict(head_dim=32, sliding_window=24, layer_types=["sliding_attention", "full_attention"])
MORE = {
    "gemma3": WINDOWS | dict(query_pre_attn_scalar=24),
    "olmo2": dict(eos_token_id=None, pad_token_id=None),
    "olmo3": WINDOWS | dict(eos_token_id=None, pad_token_id=None),
    "qwen3": dict(head_dim=32),
    "experts": EXPERTS,
    "mistral": dict(head_dim=32, sliding_window=None),
    "glm4_moe": SIGMOID | dict(head_dim=32, moe_intermediate_size=48, attention_bias=True, use_qk_norm=True),
}
LAYOUTS = {"tp1": {}, "tp2": dict(tp=2), "pp2": dict(pp=2)}
OF_EXPERTS = {"tp1": {}, "ep2": dict(ep=2), "tp2": dict(tp=2, sp=True)}
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}  # an engine's process is not a rank
PROMPTS, TOKENS = 64, 12


def lookup(hf_config, seed):
    """Weights of a seed, large enough that a wrong one shows."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in hf_shapes(hf_config).items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else 0.2 * noise
    return tensors.__getitem__


def requests():
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(SHAPE["vocab_size"]) for _ in range(rng.randint(4, 150))) for _ in range(PROMPTS)]
    return [Request(i, prompt, 1, seed=i) for i, prompt in enumerate(prompts)]


@torch.no_grad()
def compare(model, engine):
    """(number of tokens that differ from transformers', largest difference of log-probs)."""
    asked = requests()
    found = {group.id: group.responses[0] for group in engine.generate(asked, Sampling(TOKENS, temperature=0))}
    whole = [torch.tensor(request.prompt_ids + found[request.id].token_ids) for request in asked]
    logits = model(torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)).logits  # [B, S, V]
    other, worst = 0, 0.0
    for request, row in zip(asked, logits, strict=True):
        response, first = found[request.id], len(request.prompt_ids) - 1
        logprobs = row[first : first + TOKENS].log_softmax(-1)  # [R, V]
        chosen = logprobs.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
        other += int((logprobs.argmax(-1) != torch.tensor(response.token_ids)).sum())
        worst = max(worst, (chosen - torch.tensor(response.logprobs)).abs().max().item())
    return other, worst


def build(placement, hf_config, folder):
    if placement == "colocated" or placement in TOGETHER:
        options = {"tensor_parallel_size": 2} | TOGETHER[placement] if placement in TOGETHER else {}
        return VLLMEngine(hf_config, max_batch_sequences=PROMPTS, options=options)
    if parallel.rank():
        return EnginePool([], torch.float32)
    if placement == "process":
        engine = partial(VLLMEngine, hf_config, max_batch_sequences=PROMPTS)
        return EnginePool([EngineProcess(engine, "the engine", folder / "log", environment=ALONE)], torch.float32)
    room = {"max_model_len": SHAPE["max_position_embeddings"], "max_num_seqs": PROMPTS}
    return EnginePool([LocalServer(hf_config, torch.float32, folder / "log", ALONE, room)], torch.float32)


def case(placement, family, tied, root, syncs):
    shape = SHAPE | MORE.get(family, {})
    together = placement in TOGETHER
    if together:
        shape["num_key_value_heads"] = 1  # which both workers then have
    hf_config = FAMILIES[family](**shape, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(hf_config).eval()
    views = hf_views(model, hf_config)
    tie = "tied" if tied else "untied"
    engine = build(placement, hf_config, root / f"{placement}_{family}_{tie}")
    gc.freeze()  # each layout's collection would look at all that was imported
    for place, (name, layout) in enumerate((OF_EXPERTS if experts(hf_config) else LAYOUTS).items()):
        parallel.destroy_layout()
        parallel.initialize(section(**layout))
        chunks = models.build(hf_config, section(**layout), "fp32")
        for sync in range(syncs):
            version = place * syncs + sync
            weights.load(chunks, lookup(hf_config, version), Mapping(hf_config))
            weight_sync.send(
                weights.WeightStream(chunks, Mapping(hf_config)), engine, version, verify=sync == 0 or together
            )
            weights.save_folder(weights.WeightStream(chunks, Mapping(hf_config)), root / "export", hf_config)
            if parallel.rank() == 0:
                exported = load_file(root / "export" / "model.safetensors")
                assert exported.keys() == views.keys()
                for each, values in exported.items():
                    views[each].copy_(values)
                other, worst = compare(model, engine)
                print(f"CASE\t{placement} {family} {tie} {name} sync {sync}\t{other}\t{worst:.3e}", flush=True)
            elif together:
                assert not list(engine.generate([], Sampling(1)))  # it has taken part
            dist.barrier()
    if together and family == "qwen2":
        sent = dict(weights.WeightStream(chunks, Mapping(hf_config)))
        notice_a_worker_that_differs(engine, sent)
        engine.close()
        rounded_in_parts(hf_config, model, views, sent)
    engine.close()


def notice_a_worker_that_differs(engine, sent):
    """One worker differs in a norm, which both have, and in its part of a matrix."""
    before = engine.checksums()
    assert before == {name: checksum(tensor) for name, tensor in sent.items()}
    if parallel.rank() == 1:
        layer = engine._model().model.layers[1]
        for values in (layer.input_layernorm.weight, layer.self_attn.qkv_proj.bias):
            values.data[-1] += 1
    after = engine.checksums()
    different = sorted(name for name in before if before[name] != after[name])
    prefix = "model.layers.1"
    assert different == [f"{prefix}.input_layernorm.weight", f"{prefix}.self_attn.v_proj.bias"], different
    assert after[different[0]] == after[different[1]] == -1  # two workers share its one head of values


@torch.no_grad()
def rounded_in_parts(hf_config, model, views, sent):
    """FP8 weights in parts on two workers are close to the exact model, and both workers notice an error in one."""
    sent = {name: (tensor * (0.4 if "proj" in name else 1)).bfloat16() for name, tensor in sent.items()}
    for name, values in sent.items():
        views[name].copy_(values)
    options = {"tensor_parallel_size": 2, "quantization": "fp8_per_channel"}
    engine = VLLMEngine(hf_config, torch.bfloat16, max_batch_sequences=PROMPTS, options=options)
    for version in (0, 1):
        weight_sync.send(sent.items(), engine, version, verify=True)
    held, down = engine.checksums(), "model.layers.0.mlp.down_proj.weight"
    assert held[down] is held[down.replace("mlp.down", "self_attn.v")] is None and None not in (
        held[name] for name in held if "norm" in name or "embed" in name
    )
    if parallel.rank() == 0:
        other, worst = compare(model, engine)
        print(f"ROUNDED\t{other}\t{worst:.3e}", flush=True)
    else:
        assert not list(engine.generate([], Sampling(1)))
    scale = engine._model().model.layers[0].mlp.down_proj.weight_scale
    if parallel.rank() == 1:
        scale.data[3] *= 1.01
    assert engine.checksums()[down] not in (None, checksum(sent[down]))
    engine.close()


def main():
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parallel.initialize(section())
    root, syncs = Path(sys.argv[1]), int(sys.argv[2])
    for each in sys.argv[3:]:
        placement, family, tie = each.split("/")
        case(placement, family, tie == "tied", root, syncs)
    parallel.shutdown()


if __name__ == "__main__":
    main()
