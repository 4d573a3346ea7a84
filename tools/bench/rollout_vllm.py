"""Measures tokens per second of vLLM and of the hf engine on the quickstart's workload, and a weight sync against a
plain copy of the same bytes.

    OMP_NUM_THREADS=1 python tools/bench/rollout_vllm.py [--sync 3m 100m 600m]

Seconds are those of this process's CPU, one thread: a busy machine does not change them much.

Both engines hold the quickstart's model with the same random weights and sample 32 x 8 responses of up to 64 tokens at
temperature 1 with log-probs, in turns, best of `--rounds`. A sync is the whole of `weight_sync.send`, from tensors in
this process, without the full comparison; the copy is `copy_` of every tensor into memory that is there already.
"""

import argparse
import random
import time

import torch
from setups import arithmetic
from transformers import Qwen3Config

from megatron_rft.conversion import hf_shapes
from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.inference.vllm.engine import VLLMEngine

SMALLEST = "--rounds 1 --sync 3m"  # tests/bench
SIZES = {  # vocabulary, hidden, layers, feed-forward
    "3m": (1024, 192, 6, 512),
    "100m": (32000, 640, 12, 1920),
    "600m": (151936, 1024, 28, 3072),
}


def random_weights(config: Qwen3Config, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape, dtype=dtype)
        if len(shape) == 1
        else (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        for name, shape in hf_shapes(config).items()
    }


def throughput(rounds: int) -> None:
    config = arithmetic.qwen3_config()
    weights = random_weights(config, torch.float32)
    engines = {"hf": HFEngine(config, max_batch_sequences=512), "vllm": VLLMEngine(config, max_model_len=128)}
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(3, config.vocab_size) for _ in range(rng.randint(20, 40))) for _ in range(32)]
    requests = [Request(i, prompt, 8, seed=i) for i, prompt in enumerate(prompts)]
    best = dict.fromkeys(engines, 0.0)
    for engine in engines.values():
        engine.load_weights(weights.items(), version=0)
    for _ in range(rounds):
        for name, engine in engines.items():
            start = time.process_time()
            groups = list(engine.generate(requests, Sampling(64, stop_token_ids=(2,))))
            count = sum(len(response.token_ids) for group in groups for response in group.responses)
            best[name] = max(best[name], count / (time.process_time() - start))
    engines["vllm"].close()
    print("| engine | tokens/s |\n|---|---|")
    for name, speed in best.items():
        print(f"| {name} | {speed:.0f} |", flush=True)


def sync(size: str, rounds: int, dtype: torch.dtype) -> None:
    vocab, hidden, layers, feed_forward = SIZES[size]
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=feed_forward,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    weights = random_weights(config, dtype)
    target = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    engine = VLLMEngine(config, dtype, max_model_len=128, max_batch_sequences=8)
    best = {"copy": float("inf"), "sync": float("inf")}
    for round in range(rounds + 1):  # the first warms up
        start = time.process_time()
        for name, tensor in weights.items():
            target[name].copy_(tensor)
        copied = time.process_time()
        weight_sync.send(weights.items(), engine, version=round)
        ended = time.process_time()
        if round:
            best["copy"] = min(best["copy"], copied - start)
            best["sync"] = min(best["sync"], ended - copied)
    engine.close()
    count = sum(tensor.numel() for tensor in weights.values()) / 1e6
    copied, synced = best["copy"] * 1e3, best["sync"] * 1e3
    print(f"| {count:.1f} M | {copied:.1f} | {synced:.1f} | {synced / copied:.1f}x |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sync", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    arguments = parser.parse_args()
    throughput(arguments.rounds)
    print(f"\n| {arguments.dtype} | copy, ms | sync, ms | over a copy |\n|---|---|---|---|")
    for size in arguments.sync:
        sync(size, arguments.rounds, getattr(torch, arguments.dtype))


if __name__ == "__main__":
    main()
