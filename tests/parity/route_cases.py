"""Runs on several ranks: an engine and a trainer whose routers differ by rounding, so that experts flip.

usage: route_cases.py FOLDER FAMILY [FAMILY ...]

The rows of the routers are equal in pairs, so that rounding decides between the two experts of a pair. Each rank
keeps the routes of some of the responses; the trainer has other last bits in its routers. Prints a line per case:
the mismatch without replay, the mismatch with replay, how far log-probs and gradients are from those of one rank
without packing, and whether other weights choose their own experts. Loads of the experts, and the biases that they
move, are compared exactly.
"""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3MoeConfig
from transformers.utils import logging

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.config import Batching, Megatron
from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.megatron import parallel
from megatron_rft.megatron.actor import Actor
from megatron_rft.objectives.surrogates import mismatch
from megatron_rft.records import Batch, Prompt, Score
from megatron_rft.rollout.routes import RouteStore
from megatron_rft.rollout.sampler import ScoredResponse, packed, to_batch
from tests.families import FAMILIES as ALL
from tests.families import NARROW, TOWERS, seeing
from tests.parity.family_cases import KEYS, RECOMPUTE, Weighted, possible, relative
from tests.parity.gradient_cases import OPTIMIZER, SHAPE
from tests.parity.hf_cases import own_tensors
from tests.parity.layouts import release, shutdown

EXPERTS = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, norm_topk_prob=True)
FAMILIES = {
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, mlp_only_layers=[1], architectures=["Qwen3MoeForCausalLM"]),
    "glm4_moe": type(ALL["glm4_moe"])(
        **ALL["glm4_moe"].to_dict() | dict(n_group=1, topk_group=1, num_experts_per_tok=3)
    ),
    "qwen3_vl_moe": seeing(
        "qwen3_vl_moe", NARROW["qwen3_vl_moe"] | dict(num_experts_per_tok=3), TOWERS["qwen3_vl_moe"]
    ),
}
LAYOUTS = {  # by the number of ranks; without a layout all ranks are data-parallel
    1: [dict(shared=0, budget=1), dict(), dict(padded=1), dict(recompute=1, budget=60), dict(recompute=3, budget=60)],
    2: [dict(), dict(tp=2, sp=1), dict(pp=2, vpp=2, recompute=1), dict(cp=2), dict(ep=2, budget=60, recompute=3)],
    4: [dict(tp=2, sp=1, pp=2, recompute=1, budget=60), dict(tp=2, sp=1, ep=2, etp=1)],
}
RECOMPUTE = RECOMPUTE | {3: {"recompute_granularity": "selective", "recompute_modules": ["moe"]}}
TEMPERATURE, RATE = 0.8, 0.01


def tensors(config, seed: int) -> dict[str, torch.Tensor]:
    """The weights, with the routers' rows equal in pairs but for noise of `seed`."""
    found, generator = dict(own_tensors(config)), torch.Generator().manual_seed(seed)
    for name, tensor in found.items():
        if name.endswith(("gate.weight", "correction_bias")):
            found[name] = tensor[::2].repeat_interleave(2, 0)
            found[name] *= 1 + 1e-6 * torch.randn(tensor.shape, generator=generator)
    return found


def sample(config, store: RouteStore) -> Batch:
    """Three responses to each of two prompts. Each rank keeps its part; all engines sample everything, because other
    rows beside a response change its last bits, and so its experts."""
    engine = HFEngine(config)
    engine.load_weights(tensors(config, 1).items(), 1)
    prompts = {i: Prompt(i, tuple(range(3 + i, 9 + 3 * i)), "", "") for i in range(2)}
    requests = [Request(i, prompt.token_ids, 3, 7 + i) for i, prompt in prompts.items()]
    groups = engine.generate(requests, Sampling(12, TEMPERATURE, stop_token_ids=tuple(range(40, 44)), routes=True))
    rollouts = [
        ScoredResponse(group.id, i, prompts[group.id], response, "", Score(0.0))
        for group in groups
        for i, response in enumerate(group.responses)
        if group.id % dist.get_world_size() == dist.get_rank()
    ]
    rollouts = store.take(rollouts, 1)
    gathered = parallel.gather(list(map(packed, rollouts)))
    rollouts = [replace(each, prompt=prompts[each.prompt_index]) for each in gathered]
    batch = to_batch(sorted(rollouts, key=lambda r: (r.prompt_index, r.sample)))
    return batch.with_tokens(noise=torch.randn(len(batch.response_ids), generator=torch.Generator().manual_seed(2)))


def compare(config, case: dict, batch: Batch, store: RouteStore, path: Path) -> list:
    options = {KEYS[k]: v for k, v in case.items() if k in KEYS} | RECOMPUTE.get(case.get("recompute"), {})
    if "etp" in case:
        options["expert_tensor_parallel_size"] = case["etp"]
    options["moe_router_bias_update_rate"] = RATE if config.model_type == "glm4_moe" else 0.0
    megatron = Megatron(sequence_parallel=bool(case.get("sp")), **options)
    parallel.initialize(megatron)
    batching = Batching(
        micro_batch_tokens=case.get("budget", 1000),
        forward_only_tokens=case.get("budget", 1000),
        pack_sequences=not case.get("padded"),
        share_prompts="auto" if case.get("shared", 1) else "off",
    )
    actor = Actor(config, megatron, batching, "fp32", temperature=TEMPERATURE, optimizer=OPTIMIZER)
    actor.load(tensors(config, 2).__getitem__)

    def logprobs() -> torch.Tensor:
        return actor.outputs(batch, frozenset({"logprobs"}))["logprobs"]

    def kl(values: torch.Tensor) -> float:
        return mismatch(batch.tokens["rollout_logprobs"], values, batch.response_mask)["mismatch/kl"]

    own = logprobs()
    actor.routers.replay(store)
    assert torch.equal(own, actor.outputs(batch.without_sequences("route"), frozenset({"logprobs"}))["logprobs"])
    replayed = logprobs()
    with actor.use_weights(actor.snapshot()):
        untouched = torch.equal(own, logprobs())
    computed = actor.backward(batch, Weighted, {})
    assert not any(choice.unfinished for choice in actor.routers.choices)
    with actor.use_weights([getattr(t, "main_grad", t).clone() for t in actor.tensors()]):
        gradients = {name: tensor.clone().cpu() for name, tensor in actor.stream()}
    logprobs()  # a forward pass before the step does not count
    actor.apply(computed)
    found = gradients | {"logprobs": replayed}
    check_loads(actor, batch, store)
    release(actor)
    parallel.destroy_layout()
    file = path / f"{config.model_type}.pt"
    if dist.get_rank() == 0 and not file.exists():
        torch.save(found, file)
    dist.barrier()  # the others read it whole
    expected = torch.load(file)
    far = max(relative(found[n], expected[n]) for n in expected if not n.endswith("correction_bias"))
    return [kl(own), kl(replayed), far, untouched]


def check_loads(actor: Actor, batch: Batch, store: RouteStore) -> None:
    """Every sequence counts with all its tokens, whatever shares a prompt; an expert with less than the mean load gets
    a larger bias."""
    held = {key: routes for part in parallel.gather([store.held]) for key, routes in part.items()}
    routes = torch.from_numpy(np.concatenate([held[key] for key in batch.sequences["route"].tolist()])).long()
    expected = {layer: routes[:, i].flatten().bincount(minlength=8) for i, layer in enumerate(store.layers)}
    loads = actor.routers.take()
    assert loads == {layer: counts.tolist() for layer, counts in expected.items()}, (loads, expected)
    start = tensors(actor.hf_config, 2)
    for name, tensor in actor.stream():
        if name.endswith("correction_bias"):
            counts = expected[int(name.split(".")[2])].double()
            moved = start[name] + RATE * (counts.mean() - counts).sign().float()
            assert torch.equal(tensor.cpu(), moved), name


def main() -> None:
    logging.set_verbosity_error()
    parallel.initialize(Megatron())
    for family in sys.argv[2:]:
        config, store = FAMILIES[family], RouteStore.of(FAMILIES[family])
        batch = sample(config, store)
        for case in LAYOUTS[dist.get_world_size()]:
            if possible(config, case):
                parallel.destroy_layout()
                found = compare(config, case, batch, store, Path(sys.argv[1]))
                if parallel.rank() == 0:
                    print("CASE", family, *(f"{k}{v}" for k, v in case.items()), *found, sep="\t", flush=True)
        parallel.initialize(Megatron())
    shutdown()


if __name__ == "__main__":
    main()
