"""Compares one whole GRPO step, including generation, with TRL's GRPOTrainer.

    pip install trl                      # without it our side runs alone
    python tools/bench/grpo_vs_trl.py [--model FOLDER] [--prompts 16] [--group 8] [--tokens 64] [--steps 5] [--best]

Same model, weights, tokenizer, prompts, group size, reward, KL and clipping, fp32, one optimizer step a batch. Every
response has exactly `--tokens` tokens on both sides (TRL: min_new_tokens, ours: no stop token). TRL's trainer runs as
it is (transformers' generate, one batch, no gradient checkpointing, no logging, no process group, torch's own matrix
products); after each of its steps one of ours runs, so that other load on the machine meets both alike. Ratios above 1:
ours is faster.

`--best` adds a second table: each side in every precision and with every engine that runs on this machine (`WAYS`), one
after the other, each in a process of its own, and the ratio of the fastest. The work is no longer equal: TRL in bf16
keeps weights and AdamW's moments in bf16 alone, ours always has fp32 main parameters.
"""

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import torch
from setups import ADAMW, DTYPES, actor_like, arithmetic, set_threads
from sides import each

warnings.filterwarnings("ignore")

from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402

from megatron_rft.config.algorithms.online import GRPO as Options  # noqa: E402
from megatron_rft.inference import weight_sync  # noqa: E402
from megatron_rft.inference.engine import Sampling  # noqa: E402
from megatron_rft.inference.hf.engine import HFEngine  # noqa: E402
from megatron_rft.inference.vllm.engine import VLLMEngine  # noqa: E402
from megatron_rft.megatron import parallel  # noqa: E402
from megatron_rft.objectives.base import counts  # noqa: E402
from megatron_rft.objectives.grpo import GRPO  # noqa: E402
from megatron_rft.objectives.surrogates import mismatch  # noqa: E402
from megatron_rft.plan.vllm import unusable  # noqa: E402
from megatron_rft.records import Batch, Prompt, Score  # noqa: E402
from megatron_rft.rewards.base import Reward  # noqa: E402
from megatron_rft.rollout.sampler import Sampler  # noqa: E402
from megatron_rft.utils import products  # noqa: E402

SMALLEST = "--prompts 2 --group 2 --tokens 4 --steps 1 --hidden 32 --layers 1 --best"  # tests/bench
KL, CLIP, RATE = 0.001, 0.2, 1e-5
LOGPROBS = frozenset({"logprobs"})
WARM_UP = 2
# Of each side: (precision, engine). autocast: weights in fp32, products in bf16. TRL's other engines are of no use on a
# CPU: continuous batching takes 11 s a step at any size, and vLLM's packed weights refuse TRL's sync.
WAYS = {
    "TRL": (("fp32", "generate"), ("autocast", "generate"), ("bf16", "generate")),
    "megatron_rft": (("fp32", "hf"), ("bf16", "hf"), ("bf16", "vllm")),
}


def reward_of(text: str) -> float:
    """Return a cheap reward that differs within a group: the share of digits."""
    return sum(c.isdigit() for c in text) / max(len(text), 1)


class OurReward(Reward):
    def __call__(self, prompts: list[Prompt], texts: list[str]) -> list[Score]:
        return [Score(reward_of(text)) for text in texts]


class Ours:
    """Run the body of training/online.py's loop, timed by phase."""

    def __init__(self, folder: Path, tokenizer, texts: list[str], args: argparse.Namespace, way: tuple[str, str]):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        optimizer = {**ADAMW, "lr": RATE, "use_distributed_optimizer": True}
        precision, engine = way
        self.actor = actor_like(model, precision, micro_batch_tokens=args.micro_batch_tokens, optimizer=optimizer)
        self.reference = self.actor.snapshot()
        sequences = args.prompts * args.group
        if engine == "vllm":
            longest = args.tokens + max(len(tokenizer.encode(text)) for text in texts)
            self.engine = VLLMEngine(
                model.config, DTYPES[precision], max_model_len=longest, max_batch_sequences=sequences
            )
        else:
            self.engine = HFEngine(model.config, DTYPES[precision], max_batch_sequences=sequences)
        weight_sync.send(self.actor.stream(), self.engine, version=0)
        self.objective = GRPO(Options(clip_low=CLIP, clip_high=CLIP, kl_coefficient=KL))
        sampling = Sampling(max_tokens=args.tokens)
        self.sampler = Sampler(self.engine, sampling, OurReward(), tokenizer, args.group, 0, self.objective.keep)
        self.prompts = [Prompt(i, tuple(tokenizer.encode(text)), text, "") for i, text in enumerate(texts)]
        self.count, self.old, self.done = args.prompts, args.old_logprobs, 0
        self.phases: dict[str, list[float]] = defaultdict(list)

    def draw(self, count: int) -> list[Prompt]:
        start = (self.done * self.count) % (len(self.prompts) - count + 1)
        return self.prompts[start : start + count]

    def with_logprobs(self, batch: Batch) -> Batch:
        """Add the log-probs before the step and those of the reference."""
        rollout = batch.tokens["rollout_logprobs"]
        if self.old == "rollout":
            batch = batch.with_tokens(old_logprobs=rollout)
        else:
            batch = batch.with_tokens(old_logprobs=self.actor.outputs(batch, LOGPROBS)["logprobs"])
            mismatch(rollout, batch.tokens["old_logprobs"], batch.response_mask)
        with self.actor.use_weights(self.reference):
            return batch.with_tokens(ref_logprobs=self.actor.outputs(batch, LOGPROBS)["logprobs"])

    def step(self) -> None:
        clock = [time.perf_counter()]

        def lap(name: str) -> None:
            clock.append(time.perf_counter())
            self.phases[name].append(clock[-1] - clock[-2])

        pending = self.sampler.begin(self.draw(self.count), self.done)
        batch = self.sampler.conclude(self.sampler.collect(pending, self.draw, self.count), self.done).batch
        lap("generation")
        batch = self.with_logprobs(batch)
        lap("log-probs")
        for update in self.objective.prepare(batch, {}).updates:
            for mini_batch in update.steps():
                self.actor.step(mini_batch, update.loss, counts(mini_batch), update.outputs)
        lap("training")
        self.done += 1
        weight_sync.send(self.actor.stream(), self.engine, version=self.done)
        lap("sync")


class Alternate(TrainerCallback):
    """Runs one of our steps after each step of TRL. TRL's time is from the end of our step to the end of TRL's."""

    # Set later: TRL's trainer has to find no process group when it is made, or it wraps its model in DDP.
    ours: Ours | None = None

    def __init__(self):
        self.times: dict[str, list[float]] = {"TRL": [], "megatron_rft": []}
        self.left = 0.0

    def on_step_end(self, *_, **__) -> None:
        self.times["TRL"].append(time.perf_counter() - self.left)
        self.left = time.perf_counter()
        if self.ours is not None:
            self.our_step()

    def our_step(self) -> None:
        products.install_fp32()
        begin = time.perf_counter()
        self.ours.step()
        self.left = time.perf_counter()
        products.restore("fp32")
        self.times["megatron_rft"].append(self.left - begin)


def trl_trainer(
    model: Path, folder: Path, tokenizer, texts: list[str], args: argparse.Namespace, way: tuple[str, str], callback
):
    """Create TRL's GRPOTrainer."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    precision, _ = way
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=precision == "autocast",
        gradient_checkpointing=False,
        per_device_train_batch_size=args.prompts * args.group,
        gradient_accumulation_steps=1,
        num_generations=args.group,
        max_completion_length=args.tokens,
        generation_kwargs={"min_new_tokens": args.tokens},
        temperature=1.0,
        beta=KL,
        epsilon=CLIP,
        loss_type="grpo",
        scale_rewards="group",
        learning_rate=RATE,
        lr_scheduler_type="constant",
        weight_decay=ADAMW["weight_decay"],
        max_grad_norm=ADAMW["clip_grad"],
        max_steps=args.steps + WARM_UP,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=DTYPES.get(precision, torch.float32)),
        reward_funcs=lambda completions, **_: [reward_of(text) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def write_model(folder: Path, hidden: int, layers: int) -> Path:
    """A Qwen3-shaped model with random weights and a tokenizer for arithmetic."""
    shape = {"intermediate_size": 4 * hidden, "num_hidden_layers": layers}
    arithmetic.write_model_folder(folder, hidden_size=hidden, **shape)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(arithmetic.qwen3_config(hidden_size=hidden, **shape)).save_pretrained(folder)
    return folder


def measure(model: Path, args: argparse.Namespace, ways: dict[str, tuple[str, str]]) -> Alternate:
    """Run the steps of the sides in `ways`, in turns where there are two."""
    callback = Alternate()
    products.restore("fp32")  # TRL's steps run with torch's own
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = AutoTokenizer.from_pretrained(model)
        texts = [row["question"] + "\n" for row in arithmetic.rows("train", 2000)]
        trainer = None
        if "TRL" in ways:
            trainer = trl_trainer(model, Path(folder), tokenizer, texts, args, ways["TRL"], callback)
        if "megatron_rft" in ways:
            callback.ours = Ours(model, tokenizer, texts, args, ways["megatron_rft"])
        callback.left = time.perf_counter()
        if trainer is not None:
            trainer.train()
        else:
            for _ in range(args.steps + WARM_UP):
                callback.our_step()
    if callback.ours is not None:
        callback.ours.engine.close()
        parallel.shutdown()
    callback.times = {side: callback.times[side][WARM_UP:] for side in ways}
    return callback


def side_by_side(model: Path, args: argparse.Namespace, sides: list[str]) -> None:
    """Print the first table: equal work, in turns."""
    done = measure(model, args, {side: WAYS[side][0] for side in sides})
    parameters = AutoModelForCausalLM.from_pretrained(model).num_parameters()
    print(
        f"{parameters / 1e6:.1f} M parameters, {args.prompts} x {args.group} x {args.tokens} tokens, "
        f"{args.threads} thread(s), {args.steps} steps, old log-probs: {args.old_logprobs}"
    )
    print("| side | seconds per step: min | median | generated tokens/s (median) |\n| --- | --- | --- | --- |")
    generated = args.prompts * args.group * args.tokens
    for side in WAYS:
        if side not in sides:
            print(f"| {side} | left out: `pip install trl` | | |")
            continue
        least, middle = shortest(done.times[side])
        print(f"| {side} | {least:.2f} | {middle:.2f} | {generated / middle:,.0f} |")
    if len(sides) == 2:
        ratios = [a / b for a, b in zip(*(shortest(done.times[side]) for side in WAYS), strict=True)]
        print(f"ours: {ratios[0]:.2f}x by the fastest steps, {ratios[1]:.2f}x by the median")
    phases = {name: statistics.median(values[WARM_UP:]) for name, values in done.ours.phases.items()}
    print("ours by phase: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in phases.items()))


def every_way(sides: list[str]) -> dict[str, list[float]]:
    """Run every way of each side in a process of its own: "side,precision,engine" -> fastest and median seconds."""
    found = [(side, *way) for side in sides for way in WAYS[side] if way[1] != "vllm" or not unusable()]
    return each(tuple(map(",".join, found)))


def best(found: dict[str, list[float]]) -> None:
    """Print the second table."""
    print("\n| side | precision | engine | seconds per step: min | median |\n| --- | --- | --- | --- | --- |")
    medians: dict[str, list[float]] = {side: [] for side in WAYS}
    for way, (least, middle) in found.items():
        print(f"| {way.replace(',', ' | ')} | {least:.2f} | {middle:.2f} |")
        medians[way.split(",")[0]].append(middle)
    if all(medians.values()):
        print(f"each at its best: {min(medians['TRL']) / min(medians['megatron_rft']):.2f}x by the median")


def shortest(seconds: list[float]) -> tuple[float, float]:
    return min(seconds), statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--model", type=Path, help="a folder in Hugging Face format, in the place of --hidden and --layers"
    )
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument(
        "--old-logprobs",
        choices=("recompute", "rollout"),
        default="rollout",
        help="rollout: no pass for them, as TRL makes none when every batch gets one step; recompute: our default",
    )
    parser.add_argument("--best", action="store_true", help="the second table: each side in all its ways")
    parser.add_argument("--side", help=argparse.SUPPRESS)  # of one process of --best
    args = parser.parse_args()
    set_threads(args.threads)
    sides = [side for side in WAYS if side != "TRL" or find_spec("trl")]
    with tempfile.TemporaryDirectory() as name:
        model = args.model or write_model(Path(name), args.hidden, args.layers)
        if args.side:
            side, *way = args.side.split(",")
            print(json.dumps(shortest(measure(model, args, {side: tuple(way)}).times[side])))
            return
        found = every_way(sides) if args.best else {}  # first: this process is still small
        side_by_side(model, args, sides)
        if found:
            best(found)


if __name__ == "__main__":
    main()
