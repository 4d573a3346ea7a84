"""The gradient of one mini-batch under every layout. Run by test_gradient_invariance under torchrun.

usage: gradient_cases.py OUT.pt CASE [CASE ...]      a case is "tp=2,sp=1,budget=64"
The first run, on one process, writes what the others are compared with.
"""

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from transformers import Qwen3Config

from megatron_rft.config import Megatron
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives import GRPO
from megatron_rft.objectives.base import counts
from megatron_rft.records import Batch

KEYS = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}
KEYS |= {"vpp": "virtual_pipeline_model_parallel_size"}


def model_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=99,  # not a multiple of anything: the padded rows must not count
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        initializer_range=0.2,
    )


def mini_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)

    def ids(low: int, high: int) -> list[list[int]]:
        lengths = torch.randint(low, high, (12,), generator=generator).tolist()
        return [torch.randint(0, 99, (n,), generator=generator).tolist() for n in lengths]

    batch = Batch.of(ids(2, 9), ids(1, 24))
    tokens = len(batch.response_ids)
    draw = {name: torch.randn(tokens, generator=generator) for name in ("advantages", "noise", "ref_logprobs")}
    group = torch.arange(12) // 4
    batch = batch.with_sequences(group=group, rewards=torch.rand(12, generator=generator))
    return batch.with_tokens(
        advantages=draw["advantages"], old_logprobs=draw["noise"], ref_logprobs=draw["ref_logprobs"] - 5
    )


def gradients(case: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    options = {KEYS[k]: v for k, v in case.items() if k in KEYS}
    if "recompute" in case:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    megatron = Megatron(sequence_parallel=bool(case.get("sp")), **options)
    parallel.initialize(megatron)
    batching = SimpleNamespace(
        micro_batch_tokens=case.get("budget", 1000),
        forward_only_tokens=None,
        pack_sequences=not case.get("padded"),
        logprob_block_mib=64,
    )
    optimizer = {"lr": 1e-3, "clip_grad": 1.0, "use_distributed_optimizer": False}
    actor = Actor(model_config(), megatron, batching, "fp32", optimizer=optimizer, temperature=0.8)
    actor.load(weights.random_tensors(model_config(), seed=3))
    batch = mini_batch()
    old = actor.outputs(batch, frozenset({"logprobs"}))["logprobs"]
    batch = batch.with_tokens(old_logprobs=old + 0.1 * batch.tokens["old_logprobs"])
    objective = GRPO(kl_coefficient=0.05, entropy_coefficient=0.01)
    metrics = actor.backward(batch, objective.loss, counts(batch), frozenset({"logprobs", "entropy"}))
    metrics["old"] = float(old.double().sum())
    with actor.swapped([p.main_grad.clone() for m in actor.models for p in m.parameters()]):
        found = {name: value.clone() for name, value in actor.stream()}
    parallel.forget_layout()
    return found, metrics


def main() -> None:
    path, *cases = sys.argv[1:]
    for text in cases:
        case = {k: int(v) for k, v in (part.split("=") for part in text.split(",") if part)}
        found, metrics = gradients(case)
        if "write" in case:
            torch.save((found, metrics), path)
        wanted, wanted_metrics = torch.load(path)
        worst = max(((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()).item() for n in wanted)
        off = max(abs(metrics[n] - wanted_metrics[n]) / (abs(wanted_metrics[n]) + 1e-3) for n in wanted_metrics)
        if not dist.is_initialized() or dist.get_rank() == 0:
            line = {"case": text, "gradient": worst, "metrics": off, "tensors": len(found), "size": metrics["loss"]}
            print("RESULT", json.dumps(line), flush=True)
    parallel.shutdown()


if __name__ == "__main__":
    main()
