"""Measures the cost of the dynamic constraint's refiner: a step without it, with it, and with each of its
optimisations.

    python examples/miniature/dynamic.py --out FOLDER            # a model that can answer and refine, and trained ones
    python tools/bench/refiner.py FOLDER/warm/export --policy EXPORT [--engine vllm] [--rounds 5]   # EXPORT of a run

A step is sampling, grading and refining, the log-probs before the step and two optimizer steps; weights do not change,
so that every variant does the same work on the same tokens. Variants take turns. none: everything is refined, token by
token, when sampling is over. skip: nothing that has full marks. draft (vLLM): n-gram speculation from the prompt.
overlap: while later groups are being sampled. prefix (vllm): what prompts have in common is computed once, in blocks of
BLOCK tokens; the policy's engine always does that. The task's questions are shorter than a block; `--prompt-template`
makes them longer, for models that were trained with it. Wall seconds, and this process's CPU seconds, which others on
the machine disturb less (but which an overlap cannot save).
"""

import argparse
import math
import time
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from setups import actor_like, arithmetic, set_threads
from transformers import AutoModelForCausalLM, PreTrainedConfig

from megatron_rft import objectives
from megatron_rft.config.algorithms.online import GRPO
from megatron_rft.config.constraint import DynamicOptions
from megatron_rft.conversion import load_config
from megatron_rft.conversion.convert import SourceCheckpoint
from megatron_rft.data.prompts import prompt_set
from megatron_rft.data.rendering import PromptFormat, ask_again
from megatron_rft.inference.engine import Engine, Sampling, request_seed
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.objectives.base import Setting
from megatron_rft.objectives.plugins.dynamic import DynamicConstraint
from megatron_rft.rewards.math import MathReward
from megatron_rft.rollout.refiner import Refiner
from megatron_rft.rollout.sampler import Sampler
from megatron_rft.training.engines import COPIES

SMALLEST = "{model} --prompts 2 --group 2 --tokens 8 --rounds 1"  # tests/bench
TEMPLATE = "{question}{response}\nRefine:\n"  # of examples/dynamic/tiny
BLOCK = 32  # tokens; the smallest of vLLM's CPU build
MEASURES = {"hf": ("skip", "overlap"), "vllm": ("skip", "prefix", "draft", "overlap")}
CLOCKS = ("wall", "cpu", "sampling")  # seconds; sampling: of the CPU, until all is refined
OF_THE_ENGINE = {"prefix", "draft"}  # with vLLM


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="of the refiner: Hugging Face format, trained on arithmetic: refining")
    parser.add_argument("--policy", type=Path, help="default: the refiner's")
    parser.add_argument("--engine", choices=MEASURES, default="hf", help="of both")
    parser.add_argument("--prompt-template", default=arithmetic.PROMPT_TEMPLATE)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


class Bench:
    def __init__(self, args: argparse.Namespace):
        self.args, self.reward = args, MathReward()
        self.tokenizer, self.form = arithmetic.tokenizer(), PromptFormat(prompt_template=args.prompt_template)
        rows = arithmetic.rows("train", args.prompts)
        self.prompts = prompt_set(rows, self.tokenizer, self.form, "arithmetic").prompts
        self.sampling = Sampling(args.tokens, stop_token_ids=(self.tokenizer.eos_token_id,))
        model = AutoModelForCausalLM.from_pretrained(args.policy or args.model)
        self.actor = actor_like(model, "fp32", micro_batch_tokens=8192)
        self.policy = self.engine(args.policy or args.model, {"prefix"})
        self.frozen: dict[frozenset[str], Engine] = {}

    def engine(self, folder: Path, measures: set[str]) -> Engine:
        model = SourceCheckpoint(folder, "hf", load_config(folder), folder)
        engine = self.unloaded(model.hf_config, measures)
        engine.load_weights(model.tensors(), version=0)
        return engine

    def unloaded(self, config: PreTrainedConfig, measures: set[str]) -> Engine:
        if self.args.engine == "hf":
            return HFEngine(config)
        from megatron_rft.inference.vllm.engine import VLLMEngine

        options = {"block_size": BLOCK, "enable_prefix_caching": "prefix" in measures}
        options |= {"speculative_config": COPIES} if "draft" in measures else {}
        return VLLMEngine(config, max_model_len=256, options=options)

    def refiner(self, measures: set[str]) -> Refiner:
        kind = frozenset(measures & OF_THE_ENGINE if self.args.engine == "vllm" else ())
        if kind not in self.frozen:
            self.frozen[kind] = self.engine(self.args.model, kind)
        return Refiner(
            self.frozen[kind],
            Sampling(self.args.tokens, temperature=0.0, stop_token_ids=self.sampling.stop_token_ids),
            self.tokenizer,
            lambda prompt, text: ask_again(prompt, text, self.tokenizer, self.form),
            TEMPLATE,
            self.reward.maximum if "skip" in measures else math.inf,
            lambda *parts: request_seed(0, 1, *parts),
            DynamicOptions(eta=1e-3, overlap="overlap" in measures),
        )

    def step(self, measures: set[str] | None) -> dict[str, Any]:
        refiner = None if measures is None else self.refiner(measures)
        sampler = Sampler(
            self.policy, self.sampling, self.reward, self.tokenizer, self.args.group, seed=0, refiner=refiner
        )
        wall, cpu = time.perf_counter(), time.process_time()
        pending = sampler.begin(self.prompts, step=1)
        rounds = sampler.collect(pending, lambda count: self.prompts[:count], len(self.prompts))
        sampled = sampler.conclude(rounds, step=1)
        sampled_at = time.process_time() - cpu
        batch = sampled.batch.with_tokens(
            old_logprobs=self.actor.outputs(sampled.batch, frozenset({"logprobs"}))["logprobs"]
        )
        base = objectives.build(GRPO(kl_coefficient=0.0), Setting(mini_batches=2))
        objective = DynamicConstraint(base, DynamicOptions(eta=1e-3))
        for update in objective.prepare(batch, {}).updates:
            for mini_batch in update.steps():
                self.actor.step(mini_batch, update.loss, update.counts(mini_batch), update.outputs, learning_rate=1e-20)
        found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "sampling": sampled_at}
        found |= {name.partition("/")[2]: value for name, value in sampled.metrics.items() if "/" in name}
        written = {
            (each.prompt_index, each.sample): each.refined.token_ids for each in sampled.rollouts if each.refined
        }
        return found | {"written": written}

    def close(self) -> None:
        for engine in chain([self.policy], self.frozen.values()):
            engine.close()


def main() -> None:
    args = parse()
    set_threads(args.threads)
    bench, measures = Bench(args), MEASURES[args.engine]
    variants = {"without a refiner": None, "none": set(), **{name: {name} for name in measures}}
    variants |= {"all but overlap": set(measures) - {"overlap"}, "all": set(measures)}
    seen: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for number in range(args.rounds + 1):
        for name, chosen in variants.items():
            found = bench.step(chosen)
            if number:  # the first round warms up
                seen[name].append(found)
    bench.close()
    print(
        f"{args.engine}, {args.prompts} x {args.group} responses of up to {args.tokens} tokens, "
        f"{torch.get_num_threads()} thread(s)\n"
    )
    print("| | refined | verbatim | tokens/CPU s | step, s | over without | CPU, s | over without | of sampling |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, steps in seen.items():
        print(row(name, steps, seen["without a refiner"]))
    expected, others = seen["none"][0]["written"], [step["written"] for steps in seen.values() for step in steps]
    same = [ids == expected[key] for written in others for key, ids in written.items()]
    print(f"\n{sum(same)} of {len(same)} refined responses are those of `none`, token for token")


def row(name: str, steps: list[dict[str, Any]], base: list[dict[str, Any]]) -> str:
    """Return a row of medians. Variants are compared within a round, because the machine's speed varies over rounds."""
    refined = steps[0].get("refined")
    more = {
        clock: median(each[clock] - other[clock] for each, other in zip(steps, base, strict=True)) for clock in CLOCKS
    }
    whole = {clock: median(each[clock] for each in base) for clock in CLOCKS}
    speed = "–" if refined is None else f"{steps[0]['refiner_tokens'] / more['sampling']:.0f}"
    cells = ["– | –" if refined is None else f"{refined:.0f} | {steps[0].get('verbatim', 0.0):.0%}", speed]
    for clock in ("wall", "cpu"):
        cells += [f"{median(each[clock] for each in steps):.3f}", share(more[clock] / whole[clock])]
    cells.append(share(more["sampling"] / whole["cpu"]))  # the rest of the CPU's is training on the pairs
    return f"| {name} | {' | '.join(cells)} |"


def share(value: float) -> str:
    return f"{100 * value:+.1f} %"


if __name__ == "__main__":
    main()
