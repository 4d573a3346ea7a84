"""Measures tokens per second of the hf engine and of transformers' `generate`: same model, prompts, samples and
threads.

    OMP_NUM_THREADS=1 python tools/bench/rollout_hf.py

Both sides sample at temperature 1 until every row has ended or reached the limit, in turns, best of `--rounds`.
`generate` gets one rectangular batch, padded on the left, with each prompt repeated (what TRL's GRPOTrainer does), and
no log-probs; the engine returns log-probs. Rows end by a stop token of random weights, so lengths vary on both sides:
the measure is generated tokens (padding after the end not counted) over seconds.
"""

import argparse
import random
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.inference.hf.engine import HFEngine

STOP, PAD = 2, 0
SMALLEST = "--hidden 32 --layers 1 --prompts 2 --samples 2 --tokens 8 --rounds 1"  # tests/bench


def build(hidden: int, layers: int, vocab: int) -> tuple[Qwen3Config, torch.nn.Module]:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.update(eos_token_id=STOP, pad_token_id=PAD)
    return config, model


@torch.inference_mode()
def hf_generate(model, prompts: list[tuple[int, ...]], samples: int, tokens: int) -> int:
    longest = max(map(len, prompts))
    rows = [p for p in prompts for _ in range(samples)]
    ids = torch.tensor([(PAD,) * (longest - len(p)) + p for p in rows])
    mask = torch.tensor([(0,) * (longest - len(p)) + (1,) * len(p) for p in rows])
    out = model.generate(ids, attention_mask=mask, do_sample=True, max_new_tokens=tokens, top_k=0, top_p=1.0)
    response = out[:, longest:]
    ended = (response == STOP).cumsum(1)
    return int(((ended == 0) | ((ended == 1) & (response == STOP))).sum())


def ours(engine: HFEngine, prompts: list[tuple[int, ...]], samples: int, tokens: int) -> int:
    requests = [Request(i, p, samples, seed=i) for i, p in enumerate(prompts)]
    groups = engine.generate(requests, Sampling(tokens, stop_token_ids=(STOP,)))
    return sum(len(response.token_ids) for group in groups for response in group.responses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(hidden=160, layers=5, vocab=128, prompts=64, samples=8, tokens=50, rounds=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--max-batch-sequences", type=int, default=512)
    arguments = parser.parse_args()

    config, model = build(arguments.hidden, arguments.layers, arguments.vocab)
    engine = HFEngine(config, max_batch_sequences=arguments.max_batch_sequences)
    engine.load_weights(((name, p.detach()) for name, p in model.named_parameters()), version=0)
    rng = random.Random(0)
    prompts = [
        tuple(rng.randrange(3, arguments.vocab) for _ in range(rng.randint(20, 36))) for _ in range(arguments.prompts)
    ]
    work = (prompts, arguments.samples, arguments.tokens)
    sides = {"generate": lambda: hf_generate(model, *work), "hf engine": lambda: ours(engine, *work)}

    best = dict.fromkeys(sides, 0.0)
    for _ in range(arguments.rounds):
        for name, run in sides.items():
            start = time.perf_counter()
            count = run()
            best[name] = max(best[name], count / (time.perf_counter() - start))
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"{millions:.1f} M parameters, {torch.get_num_threads()} thread(s), {len(prompts)} prompts x {work[1]}")
    print("| | tokens/s | over generate |\n|---|---|---|")
    for name, speed in best.items():
        print(f"| {name} | {speed:.0f} | {speed / best['generate']:.2f}x |")


if __name__ == "__main__":
    main()
