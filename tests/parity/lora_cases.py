"""Runs on several ranks: LoRA in every layout of this world size against PEFT on the transformers twin.

Loss, gradient of every A and B, and the gradient's norm, of one SFT mini-batch. Prints one line per case.
"""

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers.utils import logging

from megatron_rft.config import Batching, Megatron
from megatron_rft.config.lora import Lora
from megatron_rft.conversion import lora
from megatron_rft.families.towers import never_sampled, sees
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.records import Batch
from tests.families import FAMILIES as TEXT
from tests.families import SEEING, transformers_class
from tests.made import made
from tests.parity.family_cases import Pictures, seeing_batch, write_folder
from tests.parity.gradient_cases import KEYS, OPTIMIZER, RECOMPUTE
from tests.parity.hf_cases import FAMILIES, section
from tests.parity.layouts import release, shutdown

NEW, DENSE, OLMO = TEXT | SEEING, ("qwen2_5_vl", "qwen3_vl"), ("olmo2", "olmo3")
LOGPROBS = frozenset({"logprobs"})
ATTENTION = Lora(rank=4, alpha=8.0, targets=["attention"])
OPTIONS = {
    **{family: Lora(rank=4, alpha=8.0) for family in ("mistral", "gemma3_text", *OLMO, "qwen3_5", *DENSE)},
    "qwen2_5_vl vision": Lora(rank=3, alpha=6.0, targets=["attention", "vision"]),
    "qwen3_vl_moe vision": Lora(rank=3, alpha=3.0, targets=["attention", "vision"]),
    "qwen3_vl vision": Lora(rank=4, alpha=2.0, targets=["vision"]),
    **{family: ATTENTION for family in ("glm4_moe", "minimax_m2", "gpt_oss", "qwen3_5_moe", "qwen3_next")},
    "qwen3": Lora(rank=4, alpha=8.0),
    "qwen2": Lora(rank=4, alpha=8.0, use_rslora=True),
    "llama": Lora(rank=3, alpha=5.0, targets=["mlp"]),
    "qwen3_moe": ATTENTION,
}
CASES = {  # world size -> family -> layouts
    1: {
        "qwen3": ["", "recompute=1", "recompute=2", "budget=40,shared=0", "padded=1,shared=0"],
        "qwen2": [""],
        "llama": ["", "recompute=1"],
        "qwen3_moe": [""],
        **{family: ["", "padded=1,shared=0"] for family in ("mistral", "gemma3_text", *OLMO, "qwen3_5")},
        **{family: [""] for family in ("glm4_moe", "minimax_m2", "gpt_oss", "qwen3_5_moe", "qwen3_next")},
        **{family: ["", "recompute=1"] for family in DENSE},
        "qwen2_5_vl vision": ["budget=40"],
        "qwen3_vl vision": ["recompute=2"],
        "qwen3_vl_moe vision": [""],
    },
    2: {
        "qwen3": ["dp=2", "tp=2", "tp=2,sp=1", "pp=2", "pp=2,vpp=2,budget=60", "cp=2", "tp=2,sp=1,recompute=1"],
        "qwen2": ["tp=2,sp=1", "tp=2"],
        "llama": ["tp=2"],
        "qwen3_moe": ["tp=2,sp=1"],
        **{family: ["tp=2,sp=1"] for family in ("gemma3_text", *OLMO, "qwen3_5", "glm4_moe", *DENSE)},
        "qwen2_5_vl vision": ["tp=2,sp=1", "pp=2,vpp=2"],
        "qwen3_vl vision": ["tp=2", "cp=2", "dp=2,budget=40"],
    },
    4: {"qwen3": ["tp=2,pp=2,vpp=2,sp=1,budget=60", "tp=2,cp=2,sp=1", "tp=2,dp=2,sp=1"]},
}


def mini_batch(hf_config) -> Batch:
    """Six ragged responses to two prompts, or with images eight to four."""
    generator = torch.Generator().manual_seed(1)

    def ids(*lengths: int) -> list[list[int]]:
        return [torch.randint(0, limit, (n,), generator=generator).tolist() for n in lengths]

    limit = 91 if sees(hf_config) else hf_config.vocab_size
    if sees(hf_config):
        return seeing_batch(lambda n: ids(n)[0], generator)
    first, second = ids(7, 4)
    batch = Batch.of([first] * 3 + [second] * 3, ids(3, 11, 6, 9, 1, 8))
    return batch.with_sequences(group=torch.arange(6) // 3)


def values(hf_config, options: Lora) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = lora.shapes(hf_config, options)
    return {name: 0.1 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def of_peft(hf_config, path: Path, options: Lora, given: dict, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """The mean loss per response token, and the gradient of each adapter, in float64, one sequence at a time."""
    model = transformers_class(hf_config).from_pretrained(path, dtype=torch.float64)
    model.config._experts_implementation = "eager"  # the grouped product has no float64
    kinds = options.peft()
    leave_out = {} if "vision" in options.targets else {"exclude_modules": r".*visual\..*"}
    model = get_peft_model(model, LoraConfig(**kinds, **leave_out))
    own = {lora.peft_name(name, hf_config): name for name in given}
    named = {own[n.replace(".default", "")]: p for n, p in model.named_parameters() if "lora_" in n}
    assert named.keys() == given.keys(), named.keys() ^ given.keys()
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(given[name])
    total, shown = 0.0, torch.tensor(never_sampled(hf_config), dtype=torch.long)
    prompts = batch.prompt_ids.split(batch.prompt_lens.tolist())
    responses = batch.response_ids.split(batch.response_lens.tolist())
    for prompt, response, key in zip(prompts, responses, batch.images.tolist(), strict=True):
        ids = torch.cat([prompt, response])[None]
        seen = Pictures(hf_config).of_transformers(key, ids) if key >= 0 else {}
        logits = model(ids, **seen).logits[:, len(prompt) - 1 : -1]
        logits[:, :, never_sampled(hf_config)] = -torch.inf
        logprobs = logits.log_softmax(-1)
        own = logprobs.gather(-1, response[None, :, None])[0, ~torch.isin(response, shown)]
        loss = -own.sum() / (~torch.isin(batch.response_ids, shown)).sum()
        if loss.requires_grad:  # a tower's adapters have no gradient of text
            loss.backward()
        total += loss.item()
    return total, {name: parameter.grad.float() for name, parameter in named.items()}


def new_actor(case: dict[str, int], hf_config, options: Lora | None) -> Actor:
    layout = {KEYS[k]: v for k, v in case.items() if k in KEYS} | RECOMPUTE.get(case.get("recompute"), {})
    megatron = Megatron(sequence_parallel=bool(case.get("sp")), **layout)
    parallel.destroy_layout()
    parallel.initialize(megatron)
    shared = "auto" if case.get("shared", 1) else "off"
    batching = Batching(
        micro_batch_tokens=case.get("budget", 1000), pack_sequences=not case.get("padded"), share_prompts=shared
    )
    actor = Actor(hf_config, megatron, batching, "fp32", optimizer=OPTIMIZER if options else None, lora=options)
    if sees(hf_config):
        actor.see(Pictures(hf_config))
    return actor


def backward(actor: Actor, batch: Batch) -> float:
    """The loss of SFT, whose gradient is then in the buffers."""
    (update,) = made("sft").prepare(batch, {}).updates
    (mini,) = update.steps()
    return actor.backward(mini, update.loss, update.counts(mini), update.outputs)["loss"]


def of_actor(case: dict[str, int], hf_config, path: Path, options: Lora, given: dict, batch: Batch):
    actor = new_actor(case, hf_config, options)
    folder = weights.open_folder(path, hf_config)
    actor.load(folder)
    actor.load(weights.new_adapters(hf_config, options, seed=1), adapters=True)
    at_zero = actor.outputs(batch, LOGPROBS)["logprobs"]
    same_stream = all(torch.equal(tensor, folder(name)) for name, tensor in actor.stream())
    base = new_actor(case, hf_config, None)
    for model in base.models:
        model.requires_grad_(False)  # torch.matmul adds in another order where a weight requires a gradient
    base.load(folder)
    same = torch.equal(at_zero, base.outputs(batch, LOGPROBS)["logprobs"]) and same_stream
    actor.load(given.__getitem__, adapters=True)
    base.load(dict((name, tensor.clone()) for name, tensor in actor.stream()).__getitem__)
    merged = base.outputs(batch, LOGPROBS)["logprobs"]
    unmerged = actor.outputs(batch, LOGPROBS)["logprobs"]
    loss = backward(actor, batch)
    norm = actor.optimizer.grad_norm()
    with actor.use_weights([p.main_grad.clone() for p in actor.tensors()]):
        gradients = {name: value.clone() for name, value in actor.stream(adapters=True)}
    held = sum(buffer.grad_data.numel() for chunk in actor.chunks for buffer in chunk.buffers)
    release(actor, base)
    return loss, gradients, norm, same, (merged - unmerged).abs().max().item(), held


def dropped(case: dict[str, int], hf_config, path: Path, given: dict, batch: Batch, dropout: float) -> list:
    """The gradients of this rank's adapters by name, with dropout."""
    actor = new_actor(case, hf_config, Lora(rank=4, alpha=8.0, dropout=dropout))
    actor.load(weights.open_folder(path, hf_config))
    actor.load(given.__getitem__, adapters=True)
    backward(actor, batch)
    found = {name: p.main_grad.clone() for name, p in weights.named_tensors(actor.models, adapters=True)}
    release(actor)
    return found


def check_dropout(hf_config, path: Path, given: dict, batch: Batch) -> None:
    """Recomputation drops the same inputs; tensor-parallel ranks get the same gradient of what each has all of."""
    ranks = dist.get_world_size()
    for sequence_parallel in range(ranks):
        case = {"tp": ranks, "sp": sequence_parallel}
        found = dropped(case, hf_config, path, given, batch, 0.3)
        again = dropped(case | {"recompute": 1}, hf_config, path, given, batch, 0.3)
        without = dropped(case, hf_config, path, given, batch, 0.0)
        for name, gradient in found.items():
            assert (gradient - again[name]).abs().max() < 1e-5 * gradient.abs().max(), name
            assert (gradient - without[name]).abs().max() > 1e-2 * gradient.abs().max(), name
            if name.endswith(("qkv.adapter.a", "fc1.adapter.a")) and not sequence_parallel:
                every = parallel.from_all_ranks(gradient, "checkpoint")
                assert all(torch.equal(each, gradient) for each in every), name


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parallel.initialize(section())
    for family, cases in CASES[dist.get_world_size()].items():
        hf_config, options, path = (FAMILIES | NEW)[family.split()[0]], OPTIONS[family], Path(sys.argv[1]) / family
        write_folder(path, hf_config)
        batch, given = mini_batch(hf_config), values(hf_config, options)
        wanted_loss, wanted = of_peft(hf_config, path, options, given, batch)
        gc.collect(), gc.freeze()  # the end of a layout collects, and need not look at all that was imported
        for text in cases:
            case = {k: int(v) for k, v in (part.split("=") for part in text.split(",") if part)}
            loss, found, norm, same, merged, held = of_actor(case, hf_config, path, options, given, batch)
            assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
            worst = max(((found[n] - g).abs().max() / g.abs().max()).item() for n, g in wanted.items())
            wanted_norm = torch.stack([g.norm() for g in wanted.values()]).norm().item()
            line = {"family": family, "case": text, "loss": abs(loss / wanted_loss - 1), "gradient": worst}
            line |= {"norm": abs(norm / wanted_norm - 1), "matrices": len(found), "zero_is_base": same}
            line |= {"merged": merged, "held": held}
            if parallel.rank() == 0:
                print("RESULT", json.dumps(line), flush=True)
        if family == "qwen3" and dist.get_world_size() < 4:
            check_dropout(hf_config, path, given, batch)
    shutdown()


if __name__ == "__main__":
    main()
