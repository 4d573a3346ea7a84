"""SmolLM2 in fp32. Prints the loss of each of four optimizer steps, by megatron-core or by transformers:

    smollm2_cases.py MODEL megatron|transformers

Or makes one step of GRPO under a layout (PP stages; further ranks are data parallel) and prints what it found. The
first run, on one rank, samples the responses with vLLM, and writes them and its gradient for the others:

    smollm2_cases.py MODEL grpo FILE PP

Or prints the mismatch in bf16 with and without truncated sampling, of an engine of PLACES:

    smollm2_cases.py MODEL truncated PLACE FOLDER
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.config import Batching, Megatron, load
from megatron_rft.conversion import HFFolder, load_config
from megatron_rft.conversion.convert import SourceCheckpoint
from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.megatron import parallel
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.base import counts
from megatron_rft.objectives.surrogates import mismatch
from megatron_rft.records import Batch, Prompt, Score
from megatron_rft.rollout.sampler import ScoredResponse, to_batch
from megatron_rft.training.engines import EngineBuilder
from tests.made import made

STEPS, RATE = 4, 1e-5
LOGPROBS = frozenset({"logprobs"})
PLACES = {
    "hf": ["rollout.engine=hf", "vllm=null"],
    "rank": [],
    "process": ["rollout.placement=process"],
    "server": ["rollout.placement=server"],
}
SAMPLINGS = {"whole": {}, "nucleus": {"top_k": 20, "top_p": 0.95}, "top_k": {"top_k": 20}}
TEXTS = [
    [("What is 17 + 25?", "17 + 25 = 42."), ("Name a colour.", "Blue."), ("What is 90 - 12?", "78")],
    [("Say hello.", "Hello! How can I help you today?"), ("What is 3 * 4?", "3 * 4 = 12.")],
]


def rows(tokenizer, step: int) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of a step's batch."""
    end = [tokenizer.eos_token_id]
    chats = [([{"role": "user", "content": asked}], answer) for asked, answer in TEXTS[step % 2]]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat, _ in chats]
    return [(prompt, tokenizer(answer)["input_ids"] + end) for prompt, (_, answer) in zip(prompts, chats, strict=True)]


def actor_of(folder: Path, megatron: Megatron, distributed: bool = True, precision: str = "fp32") -> Actor:
    parallel.initialize(megatron)
    config = load_config(folder)
    adam = {"lr": RATE, "weight_decay": 0.0, "clip_grad": 1.0, "use_distributed_optimizer": distributed}
    actor = Actor(config, megatron, Batching(), precision, optimizer=adam if precision == "fp32" else None)
    actor.load(HFFolder(folder, config))
    return actor


def by_megatron(folder: Path, tokenizer) -> None:
    actor = actor_of(folder, Megatron())
    for step in range(STEPS):
        batch = Batch.of(*map(list, zip(*rows(tokenizer, step), strict=True)))
        print("LOSS", actor.step(batch, made("sft").loss, counts(batch), learning_rate=RATE)["loss"], flush=True)
    parallel.shutdown()


def by_transformers(folder: Path, tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    # It takes the end token for padding, and its embedding would get no gradient from where it is an input.
    model.get_input_embeddings().padding_idx = None
    adam = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for step in range(STEPS):
        found = []
        for prompt, response in rows(tokenizer, step):
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            found.append(torch.nn.functional.cross_entropy(logits, torch.tensor(response), reduction="none"))
        loss = torch.cat(found).mean()
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        print("LOSS", loss.item(), flush=True)


def sampled(folder: Path, tokenizer) -> Batch:
    """Four responses of vLLM to each of two questions, every other one rewarded, with vLLM's log-probs."""
    from megatron_rft.inference.vllm.engine import VLLMEngine

    prompts = [tuple(prompt) for prompt, _ in rows(tokenizer, 0)[:2]]
    model = SourceCheckpoint(folder, "hf", load_config(folder), folder)
    engine = VLLMEngine(model.hf_config, max_model_len=128, options={"kv_cache_memory_bytes": 1 << 26})
    engine.load_weights(model.tensors(), version=0)
    asked = [Request(i, prompt, 4, seed=i) for i, prompt in enumerate(prompts)]
    groups = sorted(engine.generate(asked, Sampling(24)), key=lambda group: group.id)
    engine.close()
    pairs = [(prompts[group.id], response) for group in groups for response in group.responses]
    batch = Batch.of([list(prompt) for prompt, _ in pairs], [list(response.token_ids) for _, response in pairs])
    batch = batch.with_sequences(group=torch.arange(8) // 4, rewards=torch.arange(8) % 2 * 1.0)
    return batch.with_tokens(rollout_logprobs=torch.tensor([x for _, each in pairs for x in each.logprobs]))


def one_step(folder: Path, tokenizer, file: Path, pp: int) -> None:
    first = not file.is_file()
    batch = sampled(folder, tokenizer) if first else torch.load(file, weights_only=False)[0]
    # each rank then has the whole gradient
    actor = actor_of(folder, Megatron(pipeline_model_parallel_size=pp), distributed=False)
    grpo = made("grpo", kl_coefficient=0.0)
    before = actor.outputs(batch, LOGPROBS)["logprobs"]
    batch = batch.with_tokens(old_logprobs=before)
    (update,) = grpo.prepare(batch, grpo.init()).updates
    (steps,) = update.steps()
    computed = actor.backward(steps, update.loss, update.counts(steps), update.outputs)
    with actor.use_weights([p.main_grad.clone() for m in actor.models for p in m.parameters()]):
        gradient = {name: value.clone() for name, value in actor.stream()}
    done = actor.step(steps, update.loss, update.counts(steps), update.outputs)
    after = actor.outputs(batch, LOGPROBS)["logprobs"]
    if first:
        torch.save((batch, gradient, done, after), file)
    _, wanted, wanted_done, wanted_after = torch.load(file, weights_only=False)
    worst = max(((gradient[n] - wanted[n]).abs().max() / wanted[n].abs().max()).item() for n in wanted)
    found = {
        "vllm": (before - batch.tokens["rollout_logprobs"]).abs().max().item(),
        "gradient": worst,
        "tensors": len(gradient),
        "norm": abs(done["grad_norm"] / wanted_done["grad_norm"] - 1),
        "loss": abs(done["loss"] - wanted_done["loss"]) + abs(done["loss"] - computed["loss"]),
        "after": (after - wanted_after).abs().max().item(),
        "moved": (after - before).abs().max().item(),
    }
    if parallel.rank() == 0:
        print("FOUND", json.dumps(found), flush=True)
    parallel.shutdown()


def truncated(folder: Path, tokenizer, place: str, out: str) -> None:
    actor = actor_of(folder, Megatron(), precision="bf16")
    given = [
        f"model.path={folder}",
        f"run.output_dir={out}",
        "rollout.max_response_tokens=24",
        "rollout.temperature=1.0",
    ]
    recipe = load(Path(__file__).parents[2] / "examples/smollm2/grpo_pipo.yaml", [*given, *PLACES[place]])
    engine = EngineBuilder(recipe).build(actor.hf_config)
    weight_sync.send(actor.stream(), engine, 1, verify=True)
    prompts = [Prompt(i, tuple(ids), "", "") for i, (ids, _) in enumerate(rows(tokenizer, 0) + rows(tokenizer, 1))]
    asked, found = [Request(each.index, each.token_ids, 6, seed=each.index) for each in prompts], {}
    for name, options in SAMPLINGS.items():
        groups = sorted(engine.generate(asked, Sampling(24, 1.0, **options)), key=lambda group: group.id)
        answers = [(group.id, i, each) for group in groups for i, each in enumerate(group.responses)]
        batch = to_batch([ScoredResponse(g, i, prompts[g], each, "", Score(0.0)) for g, i, each in answers])
        batches = {name: batch}
        if batch.support_lens is not None:
            batches[f"{name}, not replayed"] = replace(batch, support_ids=None, support_lens=None)
            found[f"{name}, longest support"] = int(batch.support_lens.max())
            found[f"{name}, bytes"] = (batch.support_ids.nbytes + batch.support_lens.nbytes) / len(batch.response_ids)
        for what, each in batches.items():
            logprobs = actor.outputs(each, LOGPROBS)["logprobs"]
            found[what] = mismatch(each.tokens["rollout_logprobs"], logprobs, each.response_mask)["mismatch/kl"]
    engine.close()
    print("FOUND", json.dumps(found), flush=True)
    parallel.shutdown()


if __name__ == "__main__":
    model, what, *rest = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    if what == "grpo":
        one_step(Path(model), tokenizer, Path(rest[0]), int(rest[1]))
    elif what == "truncated":
        truncated(Path(model), tokenizer, *rest)
    else:
        {"megatron": by_megatron, "transformers": by_transformers}[what](Path(model), tokenizer)
