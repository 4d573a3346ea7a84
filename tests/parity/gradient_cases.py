"""Computes the gradient of one mini-batch under given layouts. test_gradient_invariance runs it on several ranks.

usage: gradient_cases.py OUT.pt CASE [CASE ...]      a case is "tp=2,sp=1,budget=64"
The first run, on one process, writes what the others are compared with.
"""

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3MoeConfig

from megatron_rft.config import Batching, Megatron
from megatron_rft.config.algorithms import SECTIONS
from megatron_rft.config.plugins import Teaching
from megatron_rft.conversion import FolderWriter, hf_shapes
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.two_distributions import Second
from megatron_rft.objectives.base import Loss, PolicyObjective, Sum, Update
from megatron_rft.objectives.plugins.pipo import PIPO
from megatron_rft.records import Batch
from megatron_rft.training.teacher import Teachers
from tests.made import ONLINE, distilled, dynamic, made, pipo
from tests.parity.layouts import release, shutdown

KEYS = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size"}
KEYS |= {"vpp": "virtual_pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}
RECOMPUTE = {
    1: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    2: {"recompute_granularity": "selective"},
}
OPTIMIZER = {"lr": 1e-3, "clip_grad": 1.0, "use_distributed_optimizer": False}
LOGPROBS = frozenset({"logprobs"})
read = cache(torch.load)  # a reference, which its first case writes


SHAPE = {
    "vocab_size": 99,  # not a multiple of anything: the padded rows must not count
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


def model_config(mixture: bool = False, deep: bool = False) -> Qwen3Config | Qwen3MoeConfig:
    """Of two layers, or `deep`, of four, which virtual stages need."""
    shape = SHAPE if deep else SHAPE | {"num_hidden_layers": 2}
    if mixture:
        return Qwen3MoeConfig(**shape, **EXPERTS, architectures=["Qwen3MoeForCausalLM"])
    return Qwen3Config(**shape, architectures=["Qwen3ForCausalLM"])


def mini_batch(starved: bool = False, masked: bool = False) -> Batch:
    """Twelve ragged responses to four prompts, a third of them without a context, and seven refined ones. Starved: only
    one token of one response has mask 1. Masked: an environment wrote a third of the tokens, and half of the longer
    responses are episodes of three segments."""
    generator = torch.Generator().manual_seed(1)

    def ids(low: int, high: int) -> list[list[int]]:
        lengths = torch.randint(low, high, (12,), generator=generator).tolist()
        return [torch.randint(0, 99, (n,), generator=generator).tolist() for n in lengths]

    prompts = ids(2, 9)
    batch = Batch.of([prompts[11 if i == 10 else i // 4] for i in range(12)], ids(1, 24))
    contexts = ids(5, 30)
    tokens = len(batch.response_ids)
    mask = torch.ones(tokens)
    if starved:
        mask = torch.zeros(tokens)
        mask[tokens // 2] = 1
    if masked:
        mask = (torch.arange(tokens) // 2 % 3 != 1).float()
    group, rewards = torch.arange(12) // 4, torch.rand(12, generator=generator)
    batch = batch.with_sequences(group=group, rewards=torch.where(group == 1, 0.5, rewards))
    batch = batch.with_contexts([c if i % 3 else [] for i, c in enumerate(contexts)])
    batch = batch.with_refined([r if i < 7 else [] for i, r in enumerate(ids(1, 24))])
    if masked:
        batch = with_segments(batch)
        mask[batch.segment_of < 0] = 0
    return batch.with_tokens(noise=torch.randn(tokens, generator=generator), response_mask=mask)


def with_segments(batch: Batch) -> Batch:
    """Every second response of at least ten tokens asks a sub-agent between tokens of its own, and then begins anew.
    The sub-agents have the same prompt."""
    segment_of, ids, lens = [], batch.response_ids.clone(), batch.response_lens.tolist()
    for number, length in enumerate(lens):
        cut = number % 2 == 0 and length >= 10
        segment_of.append([0, 0, -1, -1, 1, 1, 0, -2, 2, 0, *[2] * (length - 10)] if cut else [])
        start = sum(lens[:number])
        ids[start + 2 : start + 4] = torch.tensor([33, 44]) if cut else ids[start + 2 : start + 4]
    assert sum(map(bool, segment_of)) >= 3
    return replace(batch, response_ids=ids).with_segments(segment_of)


def apart(batch: Batch) -> tuple[Batch, torch.Tensor]:
    """By loops: each segment as a sequence of its own, and the places of their response tokens in the batch."""
    prompts, rows, of, places = [], [], [], []
    all_ids, all_segments = batch.response_ids.tolist(), batch.segment_of.tolist()
    ends = batch.response_lens.cumsum(0).tolist()
    for number, end in enumerate(ends):
        tokens = range(ends[number - 1] if number else 0, end)
        for segment in sorted({abs(all_segments[t]) for t in tokens}):
            first = batch.select(torch.tensor([number])).prompt_ids.tolist()
            prompts.append([all_ids[t] for t in tokens if all_segments[t] == -segment] if segment else first)
            places.append([t for t in tokens if all_segments[t] == segment])
            rows.append([all_ids[t] for t in places[-1]])
            of.append(number if segment == 0 else -1 - number)
    index = torch.tensor([t for row in places for t in row])
    number = torch.tensor([max(n, -1 - n) for n in of])
    alone = Batch.of(
        prompts,
        rows,
        tokens={name: values[index] for name, values in batch.tokens.items()},
        sequences={name: values[number] for name, values in batch.sequences.items()},
    )
    if batch.context_ids is not None:
        contexts = batch.context_ids.split(batch.context_lens.tolist())
        alone = alone.with_contexts([contexts[n].tolist() if n >= 0 else [] for n in of])
    return alone, index


LOSSES: dict[str, PolicyObjective] = {name: made(name) for name in (*ONLINE, "sft")} | {
    "grpo": made("grpo", kl_coefficient=0.05, entropy_coefficient=0.01),
    "grpo, exact KL": made("grpo", kl_coefficient=0.05, kl_estimator="exact", aggregation="group_mean"),
    "grpo, truncated weights": made("grpo", kl_coefficient=0.0, importance="truncated", aggregation="sequence_sum"),
    "dr_grpo": made("dr_grpo", max_response_tokens=24, dual_clip=1.1),
    "gspo": made("gspo", clip_low=0.05, clip_high=0.05, kl_coefficient=0.0),
    "dapo": made("dapo", overlong_buffer=10, max_response_tokens=24),
    "dapo, dynamic constraint": dynamic(made("dapo", kl_coefficient=0.0), eta=0.3),
    "cispo": made("cispo", clip_high=0.2, importance="masked", importance_cap=1.2),
    "rloo": made("rloo", kl_coefficient=0.05, aggregation="sequence_mean"),
    "reinforce_plus_plus": made("reinforce_plus_plus", gamma=0.9),
    "ppo": made("ppo", kl_coefficient=0.05),
    "grpo, truncated sampling": made("grpo", kl_coefficient=0.05, kl_estimator="exact", entropy_coefficient=0.01),
    "sdpo, averaged teacher": made("sdpo", teacher_rate=0.5, aggregation="sequence_mean"),
    "distil, jsd": made("distil", divergence="jsd", jsd_beta=0.3),
    "distil, two teachers": made("distil"),
    "grpo, distilled": distilled(made("grpo", kl_coefficient=0.05), divergence="forward_kl", coefficient=0.5),
}
# elsewhere a verification is a surrogate of given advantages, as its base's
MASKED = {f"{name}, PIPO": pipo(made(name), window=2) for name in ONLINE if SECTIONS[name].uses_rewards}

TERMS = "surrogate", "constraint"


def gradients(case: dict[str, int]) -> tuple[dict[str, dict], dict[str, dict[str, float]], dict[str, int]]:
    """By loss, with "ppo" and "ppo value" separate: (HF name -> gradient, metrics, number of sequences left out).

    `skip`: without those that have no gradient; the four responses of the second group have equal rewards."""
    options = {KEYS[k]: v for k, v in case.items() if k in KEYS}
    if "recompute" in case:
        options |= RECOMPUTE[case["recompute"]]
    megatron = Megatron(sequence_parallel=bool(case.get("sp")), **options)
    parallel.initialize(megatron)
    budget = case.get("budget", 1000)
    batching = Batching(
        micro_batch_tokens=budget,
        forward_only_tokens=2 * budget,
        pack_sequences=not case.get("padded"),
        share_prompts="auto" if case.get("shared", 1) else "off",
    )
    actors, config = {}, model_config(bool(case.get("moe")), bool(case.get("deep")))
    for model in ("actor", "critic"):
        options = {"optimizer": OPTIMIZER, "temperature": 0.8, "value_head": model == "critic"}
        actors[model] = Actor(config, megatron, batching, "fp32", **options)
        actors[model].load(with_value_head(weights.random_tensors(actors[model].hf_config, seed=3)))
    shared = actors["actor"], megatron, "fp32"
    wide, narrow = (str(teacher_folder(config, width)) for width in (48, 32))
    actors["teacher"] = Teachers(Teaching(teacher=wide), {}, *shared)
    both = Teaching(teacher={"wide": wide, "narrow": narrow})
    actors["two teachers"] = Teachers(both, {0: "narrow", 1: "wide", 2: "narrow"}, *shared)
    batch = mini_batch(starved=bool(case.get("starved")), masked=bool(case.get("masked")))
    frozen = frozen_weights(actors["actor"])
    batch = with_outputs(batch, actors, frozen)
    losses = LOSSES | (MASKED if case.get("masked") else {})
    # of several ranks the gradients with absurd values alone: those that they are compared with have none
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    given = poisoned(batch) if case.get("masked") and ranks > 1 else batch
    found, logged, left_out = of_losses(losses, given, actors, frozen, "skip" in case)
    if case.get("masked") and ranks == 1:
        again, others, _ = of_losses(losses, poisoned(batch), actors, frozen, "skip" in case)
        for name in found:
            assert all(torch.equal(found[name][n], again[name][n]) for n in found[name]), f"{name}: poisoned gradient"
            assert logged[name] == others[name], f"{name}: poisoned metrics"
        if "write" in case:
            check_apart(losses, batch, actors, frozen, found)
    logged["outputs"] = {name: float(value.double().sum()) for name, value in batch.tokens.items()}
    release(actors["actor"], actors["critic"])
    parallel.destroy_layout()
    return found, logged, left_out


def check_apart(
    losses: dict[str, PolicyObjective], batch: Batch, actors: dict[str, Actor], frozen: list[torch.Tensor], found: dict
) -> None:
    """The gradient of whole episodes is that of their losses' derivatives by the model's outputs, times the derivatives
    of these outputs with each segment in a sequence of its own."""
    for name, objective in losses.items():
        given = truncated(batch) if name.endswith("truncated sampling") else batch
        for update in updates_of(objective, given):
            if "refined" in update.batch.sequences:
                continue
            (steps,), actor = update.steps(), actors[update.model]
            alone, places = apart(steps)
            if steps.support_lens is not None:
                ids, lens = steps.support_of(places)
                alone = replace(alone, support_ids=ids.int(), support_lens=lens.int())
            teachers = actors["two teachers" if name.endswith("two teachers") else "teacher"]
            beside = second(update, alone, frozen, teachers)
            outputs = {}

            def collect(got, micro, outputs=outputs):
                for key, values in got.items():
                    outputs.setdefault(key, []).append((micro.tokens["number"], values.detach()))
                return Loss({"x": (0.0, Sum(sum(values.sum() for values in got.values()), "one"))})

            actor.backward(alone, collect, {"one": 1.0}, update.outputs, beside)
            full = {}
            for key, parts in outputs.items():
                full[key] = torch.zeros(len(steps.response_ids))
                for number, values in parts:
                    full[key][places[number]] = values
                full[key].requires_grad_()
            update.loss(full, steps).mean(update.counts(steps)).backward()
            slopes = {key: values.grad for key, values in full.items() if values.grad is not None}
            sloped = alone.with_tokens(**{f"slope {key}": grad[places] for key, grad in slopes.items()})

            def chained(got, micro, slopes=slopes):
                total = sum((got[key] * micro.tokens[f"slope {key}"]).sum() for key in slopes)
                return Loss({"x": (1.0, Sum(total, "one"))})

            actor.backward(sloped, chained, {"one": 1.0}, update.outputs, beside)
            key = name if update.model == "actor" else f"{name} value"
            for tensor, wanted in streamed_gradient(actor).items():
                off = (found[key][tensor] - wanted).abs().max() / (wanted.abs().max() + 1e-12)
                assert off < 1e-5, (key, tensor, float(off))


def poisoned(batch: Batch) -> Batch:
    """The batch with absurd values on an environment's tokens, and a turn's reward of zero elsewhere."""
    theirs = batch.response_mask == 0
    assert theirs.any() and not theirs.all()
    real = {name: values for name, values in batch.tokens.items() if values.is_floating_point()}
    named = {name: torch.where(theirs, 1e4, values) for name, values in real.items() if name != "response_mask"}
    return batch.with_tokens(**named, turn_rewards=torch.where(theirs, 1e4, 0.0))


def of_losses(
    losses: dict[str, PolicyObjective], batch: Batch, actors: dict[str, Actor], frozen: list[torch.Tensor], skip: bool
) -> tuple[dict[str, dict], dict[str, dict[str, float]], dict[str, int]]:
    """As `gradients`."""
    found, logged, left_out = {}, {}, {}
    for name, objective in losses.items():
        given = truncated(batch) if name.endswith("truncated sampling") else batch
        for update in updates_of(objective, given):
            (steps,) = update.steps()
            actor, key = actors[update.model], name if update.model == "actor" else f"{name} value"
            computed, number = update.computed(steps, skip=skip)
            teachers = actors["two teachers" if name.endswith("two teachers") else "teacher"]
            beside = second(update, computed, frozen, teachers)
            logged[key] = actor.backward(computed, update.loss, number, update.outputs, beside)
            left_out[key] = len(steps) - len(computed)
            found[key] = streamed_gradient(actor)
    return found, logged, left_out


def streamed_gradient(actor: Actor) -> dict[str, torch.Tensor]:
    with actor.use_weights([p.main_grad.clone() for m in actor.models for p in m.parameters()]):
        return {name: value.clone().cpu() for name, value in actor.stream()}


def updates_of(objective: PolicyObjective, batch: Batch) -> list[Update]:
    """Of PIPO its verification alone, of the same batch as the previous one."""
    state = objective.init()
    if not isinstance(objective, PIPO):
        return objective.prepare(batch, state).updates
    for mean in (0.25, 0.5):
        batch = batch.with_scalars(sampled_reward_sum=mean, sampled_count=1.0)
        state = objective.prepare(batch, state).state
    verification, *_ = objective.prepare(batch.with_scalars(sampled_reward_sum=1.0), state).updates
    assert verification.name == "verification"
    return [verification]


def truncated(batch: Batch) -> Batch:
    """Supports of 1 to 8 tokens that spread over the vocabulary, each with the token that was sampled."""
    kept = [
        tuple({(token + 13 * j) % 99 for j in range(1 + i % 8)}) for i, token in enumerate(batch.response_ids.tolist())
    ]
    ends = batch.response_lens.cumsum(0).tolist()
    return batch.with_supports([tuple(kept[a:b]) for a, b in zip([0, *ends], ends, strict=False)])


def with_value_head(lookup: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Give the value head nonzero weights, so that gradients pass."""
    head = torch.randn(1, model_config().hidden_size, generator=torch.Generator().manual_seed(5))
    return lambda name: head if name == "value_head.weight" else lookup(name)


def frozen_weights(actor: Actor) -> list[torch.Tensor]:
    """The weights of another model."""
    actor.load(weights.random_tensors(actor.hf_config, seed=4))
    frozen = actor.snapshot()
    actor.load(weights.random_tensors(actor.hf_config, seed=3))
    return frozen


def with_outputs(batch: Batch, actors: dict[str, Actor], frozen: list[torch.Tensor]) -> Batch:
    """The batch with all model outputs that objectives may need; the old log-probs differ a little, as after some
    steps."""
    actor, noise = actors["actor"], batch.tokens["noise"]
    now = actor.outputs(batch, LOGPROBS)["logprobs"]
    values = actors["critic"].outputs(batch, frozenset({"values"}))["values"]
    with actor.use_weights(frozen):
        ref = actor.outputs(batch, LOGPROBS)["logprobs"]
    teacher = actor.outputs(batch.in_context(), LOGPROBS)["logprobs"]
    return batch.with_tokens(
        old_logprobs=now + 0.1 * noise,
        rollout_logprobs=now + 0.2 * noise.flip(0),
        ref_logprobs=ref,
        teacher_logprobs=teacher,
        values=values + 0.3 * noise,
    )


def teacher_folder(student: Qwen3Config | Qwen3MoeConfig, width: int) -> Path:
    """A teacher of another width and a larger vocabulary; the first run writes it."""
    folder = Path(f"{sys.argv[1]}.teacher{width}.{student.model_type}{student.num_hidden_layers}")
    if not folder.exists():
        config = copy.deepcopy(student)
        config.hidden_size, config.intermediate_size, config.vocab_size = width, 80, 112
        config.tie_word_embeddings = False
        lookup = weights.random_tensors(config, seed=6)
        writer = FolderWriter(folder)
        for name in hf_shapes(config):
            writer.add(name, lookup(name))
        writer.finish(config, None)
    return folder


def second(update: Update, batch: Batch, frozen: list[torch.Tensor], teacher: Teachers) -> Second | None:
    if update.second is None:
        return None
    if update.second.weights == "distil":
        return teacher.second(batch, update.second)
    return Second(
        batch.in_context() if update.second.in_context else batch,
        None if update.second.weights == "actor" else frozen,
    )


def main() -> None:
    path, *cases = sys.argv[1:]
    for text in cases:
        case = {k: int(v) for k, v in (part.split("=") for part in text.split(",") if part)}
        found, logged, left_out = gradients(case)
        reference = Path(".".join([path, *(str(case.get(kind, 0)) for kind in ("starved", "moe", "masked", "deep"))]))
        if "write" in case:
            torch.save((found, logged), reference)
        if dist.is_initialized() and dist.get_rank():
            continue  # all ranks have the same
        wanted, wanted_logged = map(dict, read(reference))
        for name in wanted:
            worst = max(
                ((found[name][n] - wanted[name][n]).abs().max() / (wanted[name][n].abs().max() + 1e-12)).item()
                for n in wanted[name]
            )
            if left_out[name]:  # other metrics are means over the computed sequences
                wanted_logged[name] = {n: v for n, v in wanted_logged[name].items() if n in {"loss", *TERMS}}
            # some are means of numbers around 1 that cancel each other: relative to 0.1 where they are smaller, so
            # by about eight units in the last place of 1 in fp32; starved, one is the difference of two log-probs
            alone = {"teacher_advantage"} if case.get("starved") else ()
            off = max(
                abs(logged[name][n] - v) / (abs(v) + (1 if n in alone else 0.1)) for n, v in wanted_logged[name].items()
            )
            line = {"case": text, "loss": name, "gradient": worst, "metrics": off, "tensors": len(found[name])}
            line |= {"size": logged[name]["loss"], "left_out": left_out[name]}
            print("RESULT", json.dumps(line), flush=True)
        off = max(abs(logged["outputs"][n] - v) / (abs(v) + 1) for n, v in wanted_logged["outputs"].items())
        print("RESULT", json.dumps({"case": text, "loss": "outputs", "gradient": 0.0, "metrics": off}), flush=True)
    shutdown()


if __name__ == "__main__":
    main()
