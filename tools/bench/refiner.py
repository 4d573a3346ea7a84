"""What the refiner of the dynamic constraint costs: a step without it, with it, and with each of its measures.

    python examples/compare_constraints.py --out FOLDER          # a model that can answer and refine, and trained ones
    python tools/bench/refiner.py FOLDER/warm/export [--policy FOLDER/runs/dynamic_0/export] [--rounds 5]

A step is sampling, grading and refining, the log-probs before the step and two optimizer steps; weights do not change,
so that every variant does the same work on the same tokens. Variants take turns. none: everything is refined, token by
token, when sampling is over. skip: nothing that has full marks. draft: the response is the guess of its refinement.
overlap: while later groups are being sampled. Wall seconds, and this process's CPU seconds, which others on the machine
disturb less (but which an overlap cannot save).
"""

import argparse
import math
import time
from pathlib import Path
from statistics import median

import torch
from setups import actor_like, set_threads
from transformers import AutoModelForCausalLM

from megatron_rft.data import arithmetic
from megatron_rft.data.prompts import PromptFormat, ask_again, prompt_set
from megatron_rft.objectives import GRPO, DynamicConstraint
from megatron_rft.rewards.math import MathReward
from megatron_rft.rollout.engine import Sampling
from megatron_rft.rollout.hf_engine import HFEngine
from megatron_rft.rollout.refiner import Refiner
from megatron_rft.rollout.sampler import Sampler, request_seed

TEMPLATE = "{question}{response}\nRefine:\n"  # of examples/dynamic/tiny
VARIANTS = {
    "without a refiner": None,
    "none": set(),
    "skip": {"skip"},
    "draft": {"draft"},
    "overlap": {"overlap"},
    "all": {"skip", "draft", "overlap"},
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="of the refiner: Hugging Face format, trained on arithmetic: refining")
    parser.add_argument("--policy", type=Path, help="default: the refiner's")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.reward = args, MathReward(workers=0)
        self.tokenizer, self.form = arithmetic.tokenizer(), PromptFormat(prompt_template=arithmetic.PROMPT_TEMPLATE)
        rows = arithmetic.rows("train", args.prompts)
        self.prompts = prompt_set(rows, self.tokenizer, self.form, "arithmetic").prompts
        self.sampling = Sampling(args.tokens, stop_token_ids=(self.tokenizer.eos_token_id,))
        self.policy, self.frozen = (HFEngine(folder) for folder in (args.policy or args.model, args.model))
        model = AutoModelForCausalLM.from_pretrained(args.policy or args.model)
        self.actor = actor_like(model, "fp32", micro_batch_tokens=8192)

    def refiner(self, measures: set[str]) -> Refiner:
        return Refiner(
            self.frozen,
            Sampling(self.args.tokens, temperature=0.0, stop_token_ids=self.sampling.stop_token_ids),
            self.tokenizer,
            lambda prompt, text: ask_again(prompt, text, self.tokenizer, self.form),
            TEMPLATE,
            self.reward.maximum if "skip" in measures else math.inf,
            lambda *parts: request_seed(0, 1, *parts),
            draft="draft" in measures,
            overlap="overlap" in measures,
        )

    def step(self, measures: set[str] | None) -> dict[str, float]:
        refiner = None if measures is None else self.refiner(measures)
        sampler = Sampler(
            self.policy, self.sampling, self.reward, self.tokenizer, self.args.group, seed=0, refiner=refiner
        )
        wall, cpu = time.perf_counter(), time.process_time()
        sampled = sampler.sample(lambda count: self.prompts[:count], len(self.prompts), step=1)
        sampled_at = time.process_time() - cpu
        batch = sampled.batch.with_tokens(
            old_logprobs=self.actor.outputs(sampled.batch, frozenset({"logprobs"}))["logprobs"]
        )
        for update in DynamicConstraint(GRPO(kl_coefficient=0.0, mini_batches=2), 1e-3).prepare(batch, {}).updates:
            for mini_batch in update.steps():
                self.actor.step(mini_batch, update.loss, update.counts(mini_batch), update.outputs, learning_rate=1e-20)
        found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "sampling": sampled_at}
        metrics = sampled.metrics
        return found | {name.partition("/")[2]: value for name, value in metrics.items() if "/" in name}


def main() -> None:
    args = parse()
    set_threads(args.threads)
    bench = Bench(args)
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for number in range(args.rounds + 1):
        for name, measures in VARIANTS.items():
            found = bench.step(measures)
            if number:  # the first round warms up
                seen[name].append(found)
    base = {clock: median(each[clock] for each in seen["without a refiner"]) for clock in ("wall", "cpu", "sampling")}
    print(
        f"{args.prompts} x {args.group} responses of up to {args.tokens} tokens, {torch.get_num_threads()} thread(s)\n"
    )
    print("| | refined | verbatim | tokens/s | step, s | over no refiner | CPU, s | over no refiner | of sampling |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, steps in seen.items():
        print(row(name, steps, base))


def row(name: str, steps: list[dict[str, float]], base: dict[str, float]) -> str:
    refined, seconds = steps[0].get("refined"), median(each.get("refiner_seconds", 0.0) for each in steps)
    speed = f"{steps[0]['refiner_tokens'] / seconds:.0f}" if seconds else "–"
    about = f"{refined:.0f} | {steps[0].get('verbatim', 0.0):.0%}" if refined is not None else "– | –"
    clocks = []
    for clock in ("wall", "cpu"):
        value = median(each[clock] for each in steps)
        clocks += [f"{value:.3f}", f"{100 * (value / base[clock] - 1):+.1f} %" if refined is not None else "–"]
    # of the CPU's share above, what sampling and refining take; the rest is training on the pairs
    more = (median(each["sampling"] for each in steps) - base["sampling"]) / base["cpu"]
    clocks.append(f"{100 * more:+.1f} %" if refined is not None else "–")
    return f"| {name} | {about} | {speed} | {' | '.join(clocks)} |"


if __name__ == "__main__":
    main()
