"""Measures tokens per second with and without a draft of the response that differs in a few tokens.

    OMP_NUM_THREADS=1 python tools/bench/predicted_output.py [--changed 0 0.02 0.1]

A model of random weights writes greedy responses. Its guesses are those responses with a share of their tokens changed,
so that what it writes from them is a copy with corrections, as a refiner's: the same tokens with a guess and without,
which is checked. Sides in turns, best of `--rounds`, in seconds of this process's CPU, one thread.
"""

import argparse
import random
import time
from contextlib import closing
from dataclasses import replace

import torch
from rollout_vllm import random_weights

from megatron_rft.data import arithmetic
from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.inference.vllm.engine import VLLMEngine

SMALLEST = "--changed 0.1 --batch 2 --tokens 12 --ahead 4 --rounds 1"  # tests/bench


def run(engine: VLLMEngine, requests: list[Request], sampling: Sampling) -> tuple[dict[int, tuple[int, ...]], float]:
    start = time.process_time()
    found = {group.id: group.responses[0].token_ids for group in engine.generate(requests, sampling)}
    return found, sum(map(len, found.values())) / (time.process_time() - start)


def changed(tokens: tuple[int, ...], share: float, rng: random.Random, vocabulary: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocabulary) if rng.random() < share else token for token in tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changed", type=float, nargs="*", default=[0.0, 0.02, 0.1])
    for name, value in dict(batch=8, tokens=100, ahead=16, rounds=3).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    rng, config = random.Random(0), arithmetic.qwen3_config()
    prompts = [tuple(rng.randrange(3, config.vocab_size) for _ in range(20)) for _ in range(arguments.batch)]
    speculation = {"method": "predicted_output", "num_speculative_tokens": arguments.ahead}
    sampling = Sampling(arguments.tokens, temperature=0)
    with (
        closing(VLLMEngine(config, max_model_len=256)) as plain,
        closing(VLLMEngine(config, max_model_len=256, options={"speculative_config": speculation})) as guessing,
    ):
        for engine in (plain, guessing):
            engine.load_weights(random_weights(config, torch.float32).items(), version=0)
        requests = [Request(i, prompt, 1, seed=i) for i, prompt in enumerate(prompts)]
        expected, _ = run(plain, requests, sampling)
        print(f"batch {arguments.batch}\n| changed | tokens/s without | with | ratio | tokens a pass | accepted |")
        print("|---|---|---|---|---|---|")
        for share in arguments.changed:
            guessed = [replace(r, draft=changed(expected[r.id], share, rng, config.vocab_size)) for r in requests]
            best = {"plain": 0.0, "guess": 0.0}
            for _ in range(arguments.rounds):
                best["plain"] = max(best["plain"], run(plain, requests, sampling)[1])
                found, speed = run(guessing, guessed, sampling)
                best["guess"] = max(best["guess"], speed)
                assert found == expected, "a guess changed a token"
            counted = guessing.statistics()
            accepted = counted["speculation/accepted"] / counted["speculation/proposed"]
            print(
                f"| {share:.0%} | {best['plain']:.0f} | {best['guess']:.0f} | {best['guess'] / best['plain']:.1f}x "
                f"| {counted['speculation/tokens_per_step']:.1f} | {accepted:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
