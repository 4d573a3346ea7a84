"""The parts of gpu_checks.sh about engines: how they get weights, what they compute with, and how much memory they
leave."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from gpu_checks_common import DEVICE, GPU, NotRun, Row, bound, need, need_gpu, seconds, without_rank
from setups import actor_like, hf_model, qwen3
from transformers import Qwen3MoeConfig

from megatron_rft.config import Batching, Megatron
from megatron_rft.config.algorithms.offline import SFT as Options
from megatron_rft.conversion import hf_shapes
from megatron_rft.data import arithmetic
from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Engine, Request, Sampling, checksum
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.inference.process import EngineProcess
from megatron_rft.inference.transport import network
from megatron_rft.megatron import parallel
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.weights import save_folder
from megatron_rft.objectives.base import counts
from megatron_rft.objectives.sft import SFT
from megatron_rft.objectives.surrogates import mismatch
from megatron_rft.plan.vllm import unusable
from megatron_rft.records import Batch, Prompt, Score
from megatron_rft.rollout.routes import RouteStore
from megatron_rft.rollout.sampler import ScoredResponse, to_batch
from megatron_rft.utils.errors import ConfigError

SIZE, SPREAD = ("600m", 0.02) if GPU else ("1m", 0.1)  # a model without training, and its weights' deviation
RECIPE = str(Path(__file__).parents[1] / "examples" / "quickstart" / "pipo.yaml")
LENGTHS = (16, 4, 64) if GPU else (8, 2, 24)  # prompts, responses to each, tokens of each
SAME = ("vocab_size", "hidden_size", "head_dim", "max_position_embeddings", "tie_word_embeddings", "eos_token_id")
PARITY = {"bf16": 1e-2, "fp8": 5e-2}  # mismatch/kl of vLLM and the trainer; that of FP8 is the default alarm's


def random_weights(seed: int, size: str = SIZE) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = hf_shapes(qwen3(size))
    return {name: torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for name, shape in shapes.items()}


# ---- to an engine's process


def engine_process(transport: str) -> Iterator[Row]:
    """Check that every bit of every tensor arrives in the other process after each sync, and in its replacement."""
    build = partial(HFEngine, qwen3(SIZE), torch.bfloat16, DEVICE)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(EngineProcess(build, "engine", Path(folder, "log"))) as engine,
    ):
        if engine.transport != transport:
            raise AssertionError(f"weights go by {engine.transport}, expected {transport}")
        taken = []
        for version in range(4):
            weights = random_weights(version)
            pushed = weight_sync.send(weights.items(), engine, version, verify=True)  # RunFailed where a bit differs
            taken.append(weight_sync.send(weights.items(), engine, version)["sync/seconds"])
        yield "bits that differ after 4 syncs", "0", f"{pushed['sync/tensors']:.0f} tensors"
        copies = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        copy = seconds(lambda: [copies[name].copy_(tensor) for name, tensor in weights.items()])
        rate = pushed["sync/bytes"] / min(taken[1:]) / 1e9
        yield "a sync", f"{min(taken[1:]) * 1e3:.1f} ms, {rate:.2f} GB/s", f"a copy in one process {copy * 1e3:.1f} ms"
        os.kill(engine.process.pid, signal.SIGKILL)
        engine.start()
        weight_sync.send(weights.items(), engine, 5, verify=True)
        yield "the same in the place of a killed process", engine.transport, ""


def megatron_rft(name: str, options: list[str]) -> str:
    """Run a command on the quickstart's recipe in a process of its own, and return its output."""
    command = [sys.executable, "-m", "megatron_rft", name, RECIPE, *options]
    done = subprocess.run(command, env=without_rank(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"megatron-rft {name} failed: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def need_no_gpu() -> None:
    if GPU:
        raise NotRun("there is a CUDA device, and its memory is used")


# ---- to a server


def receiver(port: int, syncs: int, results) -> None:
    device = torch.device("cuda:1") if torch.cuda.device_count() > 1 else None
    link = network.connect(network.rendezvous("127.0.0.1", 2, 120, port), 1, 2, 120, device)
    for _ in range(syncs):
        results.put({name: checksum(tensor) for name, tensor in network.receive(link)})


def over_the_wire() -> Iterator[Row]:
    context, store, syncs = multiprocessing.get_context("spawn"), network.rendezvous("127.0.0.1", 2, 120), 3
    results = context.Queue()
    other = context.Process(target=receiver, args=(store.port, syncs, results))
    other.start()
    try:
        device = torch.device("cuda:0") if torch.cuda.device_count() > 1 else None
        link = network.connect(store, 0, 2, 120, device)
        for seed in range(syncs):
            weights = random_weights(seed)
            network.send(link, weights.items())
            sent = {name: checksum(tensor) for name, tensor in weights.items()}
            if results.get(timeout=120) != sent:
                raise AssertionError(f"other tensors came than were sent, at sync {seed}")
    finally:
        other.join(30)
        other.kill()
    yield "bits that differ after 3 syncs", "0", network.GPU if device else network.HOST


def by_nccl() -> Iterator[Row]:
    need_gpu()
    if torch.cuda.device_count() < 2:
        raise NotRun("one CUDA device, and NCCL wants one for each end")
    yield from over_the_wire()


# ---- vLLM


def vllm_engine(options: dict, longest: int = 256, sequences: int = 64, **memory) -> Engine:
    if problem := unusable():
        raise NotRun(problem)
    from megatron_rft.inference.vllm.engine import VLLMEngine

    config = qwen3(SIZE, initializer_range=SPREAD)
    return VLLMEngine(config, torch.bfloat16, DEVICE, longest, sequences, options, **memory)


def sampled(engine: Engine, vocab: int) -> Batch:
    prompts, each, longest = LENGTHS
    generator = torch.Generator().manual_seed(3)
    texts = [tuple(torch.randint(1, vocab, (20 + i,), generator=generator).tolist()) for i in range(prompts)]
    groups = engine.generate([Request(i, text, each, seed=i) for i, text in enumerate(texts)], Sampling(longest))
    found = [(texts[group.id], response) for group in groups for response in group.responses]
    logprobs = torch.tensor([value for _, response in found for value in response.logprobs])
    return Batch.of(
        [list(prompt) for prompt, _ in found],
        [list(response.token_ids) for _, response in found],
        tokens={"rollout_logprobs": logprobs, "response_mask": torch.ones_like(logprobs)},
    )


def beside(actor: Actor, batch: Batch) -> dict[str, float]:
    """Return the difference between the engine's log-probs of its samples and the trainer's."""
    logprobs = actor.outputs(batch, frozenset({"logprobs"}))["logprobs"]
    return mismatch(batch.tokens["rollout_logprobs"], logprobs, batch.tokens["response_mask"])


def beside_the_trainer(options: dict, kind: str) -> Iterator[Row]:
    """Compare the trainer's bf16 log-probs with vLLM's on samples after each of two syncs."""
    if kind == "fp8":
        need("vllm")
        if GPU:
            need_gpu((8, 9))
        elif options.get("quantization") not in (None, "fp8_per_channel"):
            raise NotRun("no CUDA device; vLLM's CPU build has fp8_per_channel alone")
    config = qwen3(SIZE, initializer_range=SPREAD)
    actor = actor_like(hf_model(config, "bf16"), "bf16", micro_batch_tokens=4096)  # first: it makes the world
    try:
        engine = vllm_engine(options)
    except ConfigError as error:
        raise NotRun(str(error).splitlines()[0]) from None
    with closing(engine):
        for version in range(2):
            weight_sync.send(actor.stream(), engine, version, verify=True)
            batch = sampled(engine, config.vocab_size)
            found, tokens = beside(actor, batch), len(batch.tokens["response_mask"])
            yield bound(found["mismatch/kl"], PARITY[kind], f"mismatch/kl, sync {version}, {tokens} tokens")
            yield f"mismatch/share, sync {version}", f"{found['mismatch/share']:.3f}", "of the tokens"
            yield f"mismatch/max, sync {version}", f"{found['mismatch/max']:.3f}", "nats"
            actor.step(batch, SFT(Options()).loss, counts(batch), learning_rate=1e-4)


def replayed_experts() -> Iterator[Row]:
    """Compare a mixture's bf16 log-probs with the hf engine's, with the engine's experts and with the trainer's own."""
    shape = qwen3("1m").to_dict()
    shape = {name: shape[name] for name in (*SAME, "num_hidden_layers", "num_attention_heads", "num_key_value_heads")}
    config = Qwen3MoeConfig(**shape, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=96)
    generator = torch.Generator().manual_seed(1)
    weights = {n: 0.1 * torch.randn(s, generator=generator).bfloat16() for n, s in hf_shapes(config).items()}
    if not torch.distributed.is_initialized():
        parallel.initialize(Megatron())
    engine, store = HFEngine(config, torch.bfloat16, DEVICE), RouteStore.of(config)
    engine.load_weights(((name, tensor.to(DEVICE)) for name, tensor in weights.items()), 0)
    actor = Actor(config, Megatron(), Batching(), "bf16")
    actor.load(weights.__getitem__)
    prompts = [Prompt(i, tuple(range(3 + i, 20 + 2 * i)), "", "") for i in range(LENGTHS[0])]
    requests = [Request(i, prompt.token_ids, LENGTHS[1], seed=i) for i, prompt in enumerate(prompts)]
    rollouts = [
        ScoredResponse(group.id, i, prompts[group.id], response, "", Score(0.0))
        for group in engine.generate(requests, Sampling(LENGTHS[2], routes=True))
        for i, response in enumerate(group.responses)
    ]
    batch = to_batch(store.take(rollouts, 1)[0])
    own = beside(actor, batch)["mismatch/kl"]
    actor.routers.replay(store)
    found = beside(actor, batch)["mismatch/kl"]
    yield bound(found, PARITY["bf16"], f"mismatch/kl with the engine's experts, {len(batch.response_ids)} tokens")
    yield "mismatch/kl with the trainer's own experts", f"{own:.2e}", "the row above"


def memory() -> float:
    """Return the GiB of the device in use by all processes."""
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    return (whole - free) / 2**30


def sleep_and_wake() -> Iterator[Row]:
    """Check that a sleeping colocated engine frees its memory for the trainer, and works again after waking."""
    need_gpu()
    need("vllm")
    config = qwen3(SIZE, initializer_range=SPREAD)
    actor = actor_like(hf_model(config, "bf16"), "bf16", micro_batch_tokens=8192)
    yield "in use: actor", f"{memory():.1f} GiB", ""
    with closing(vllm_engine({})) as engine:
        awake = memory()
        yield "in use: actor and engine", f"{awake:.1f} GiB", ""
        weight_sync.send(actor.stream(), engine, 0, verify=True)
        batch = sampled(engine, config.vocab_size)
        for version in (1, 2):
            engine.sleep()
            torch.cuda.empty_cache()
            asleep = memory()
            yield f"in use: engine asleep, time {version}", f"{asleep:.1f} GiB", "below the former"
            if asleep >= awake:
                raise AssertionError("sleeping gave no memory back")
            torch.cuda.reset_peak_memory_stats()
            actor.step(batch, SFT(Options()).loss, counts(batch), learning_rate=1e-5)
            yield f"the step's own peak, time {version}", f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", ""
            engine.wake(cache=False)
            yield f"in use: engine's weights awake, time {version}", f"{memory():.1f} GiB", f"below {awake:.1f}"
            weight_sync.send(actor.stream(), engine, version, verify=True)
            engine.wake()
            yield f"in use: engine awake, time {version}", f"{memory():.1f} GiB", f"before {awake:.1f}"
            batch = sampled(engine, config.vocab_size)
            found = beside(actor, batch)
            yield bound(found["mismatch/kl"], PARITY["bf16"], f"mismatch/kl after waking, time {version}")


def draft_model() -> Iterator[Row]:
    """Check that vLLM accepts what a draft model with the trainer's own weights proposes, also after a sleep."""
    need_gpu()
    need("vllm")
    config = qwen3(SIZE, initializer_range=SPREAD)
    actor = actor_like(hf_model(config, "bf16"), "bf16", micro_batch_tokens=4096)
    with tempfile.TemporaryDirectory() as folder:
        save_folder(actor.stream(), f"{folder}/draft", config)
        drafts = {"method": "draft_model", "model": f"{folder}/draft", "num_speculative_tokens": 4}
        engine = vllm_engine({"speculative_config": drafts})
    with closing(engine):
        for version, when in enumerate(("at first", "after a sleep")):
            weight_sync.send(actor.stream(), engine, version, verify=True)
            sampled(engine, config.vocab_size)
            found = engine.statistics()
            refused = 1 - found["speculation/accepted"] / found["speculation/proposed"]
            yield bound(refused, 0.1, f"share of the draft tokens that are refused, {when}")
            engine.sleep()
            engine.wake()


def generated(engine: Engine, requests: list[Request], sampling: Sampling) -> int:
    """Return how many tokens the engine generates."""
    return sum(len(response.token_ids) for group in engine.generate(requests, sampling) for response in group.responses)


def decoding(kind: str) -> Iterator[Row]:
    """Yield the tokens per second of batches of several sizes, prompts of 16 tokens."""
    config, sizes, longest = qwen3(SIZE, initializer_range=SPREAD), (16, 128, 512) if GPU else (4,), 256 if GPU else 16
    weights = random_weights(0)
    if kind == "vLLM":
        need("vllm")
        engine = vllm_engine({}, 512, max(sizes))
    else:
        engine = HFEngine(config, torch.bfloat16, DEVICE, max(sizes))
    with closing(engine):
        engine.load_weights(weights.items(), version=0)
        for size in sizes:
            requests = [Request(i, tuple(range(1, 17)), 1, seed=i) for i in range(size)]

            generate = partial(generated, engine, requests, Sampling(longest))
            if (count := generate()) != size * longest:
                raise AssertionError(f"{count} tokens, expected {size * longest}")
            taken = seconds(generate, 2)
            yield (
                f"{size} sequences",
                f"{size * longest / taken:,.0f} tokens/s",
                f"{taken / longest * 1e3:.2f} ms a token",
            )


def two_engines() -> Iterator[Row]:
    """Check that a refiner's engine answers while the policy's engine, in the same process, sleeps."""
    need("vllm")
    config = qwen3(SIZE, initializer_range=SPREAD)
    actor = actor_like(hf_model(config, "bf16"), "bf16", micro_batch_tokens=4096)
    share = {"gpu_share": 0.25}
    with closing(vllm_engine({}, **share)) as policy, closing(vllm_engine({}, sleeps=False, **share)) as refiner:
        weight_sync.send(actor.stream(), refiner, 0, verify=True)
        for version, when in enumerate(("at first", "after a sleep")):
            weight_sync.send(actor.stream(), policy, version, verify=True)
            policy.wake()
            found = beside(actor, sampled(policy, config.vocab_size))
            yield bound(found["mismatch/kl"], PARITY["bf16"], f"mismatch/kl of the policy's engine, {when}")
            policy.sleep()
            found = beside(actor, sampled(refiner, config.vocab_size))
            yield bound(found["mismatch/kl"], PARITY["bf16"], f"mismatch/kl of the refiner's meanwhile, {when}")
            policy.wake(cache=False)


def whole_run() -> Iterator[Row]:
    """Train for two steps with `rollout.offload_trainer`, and print the memory of each phase beside the plan's."""
    need("vllm")
    fields = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "head_dim")
    with tempfile.TemporaryDirectory() as folder:
        arithmetic.write_model_folder(f"{folder}/model", **{name: getattr(qwen3(SIZE), name) for name in fields})
        options = [
            f"model={{path: {folder}/model, initialise: random, precision: bf16}}",
            f"run={{output_dir: {folder}/run, steps: 2}}",
            "rollout.offload_trainer=true",
            "data.validation=null",
            "data.test=null",
            "evaluation.every=null",
        ]
        gib = f"{torch.cuda.mem_get_info()[1] / 2**30:.0f}" if GPU else None
        planned = megatron_rft("plan", [*options, *(["--gpu-gib", gib] if gib else [])])
        megatron_rft("train", options)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    yield "planned", next(line for line in planned.splitlines() if line.startswith("memory by phase")), ""
    for name, value in json.loads(lines[-1]).items():
        if name.startswith("memory/"):
            yield name, f"{value:.2f} GiB", "of torch's allocator" if GPU else "of the process"


def by_ipc() -> Iterator[Row]:
    need_gpu()
    yield from engine_process("CUDA IPC")


def by_host_memory() -> Iterator[Row]:
    need_no_gpu()
    yield from engine_process("shared host memory")


Parts = dict[str, Callable[[], Iterator[Row]]]
VLLM: Parts = {
    "colocated vLLM sleeps while the trainer steps": sleep_and_wake,
    "vLLM with a draft model": draft_model,
    "two vLLM engines, as with a dynamic constraint": two_engines,
    "a run with rollout.offload_trainer beside its plan": whole_run,
    "vLLM in bf16 beside the trainer": lambda: beside_the_trainer({}, "bf16"),
    "vLLM with an FP8 cache beside the trainer": lambda: beside_the_trainer({"kv_cache_dtype": "fp8"}, "fp8"),
}
VLLM |= {
    f"vLLM with {name} weights beside the trainer": partial(beside_the_trainer, {"quantization": name}, "fp8")
    for name in ("fp8", "fp8_per_channel", "fp8_per_block")
}
EXPERTS: Parts = {"hf engine's experts in the trainer": replayed_experts}
DECODING: Parts = {f"decoding, {kind}": partial(decoding, kind) for kind in ("hf engine", "vLLM")}
TRANSPORT: Parts = {
    "weights to an engine process, CUDA IPC": by_ipc,
    "weights to an engine process, shared host memory": by_host_memory,
    "weights to a server, NCCL": by_nccl,
    "weights to a server, gloo": lambda: need_no_gpu() or over_the_wire(),
}
