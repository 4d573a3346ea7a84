"""Runs on several ranks: compares log-probs, entropies, all gradients and the export of each family with transformers.

usage: family_cases.py FOLDER FAMILY [FAMILY ...]

FOLDER gets the models and what transformers computes of them, which later runs there read: a new one after a change.
transformers computes the sequences one by one; the actor packs them, lets responses share prompts, or pads them, in
micro-batches of several sizes. A model that sees gets prompts with no, one and two images. Prints one line per family
and layout.
"""

import gc
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers.utils import logging

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.config import Batching, Megatron
from megatron_rft.families.checks import needs_sequence_parallel, whole_experts, whole_sequences
from megatron_rft.families.shapes import experts, hf_shapes
from megatron_rft.families.tables import family_of
from megatron_rft.families.towers import never_sampled, sees
from megatron_rft.megatron import images, parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.records import Batch
from tests.families import FAMILIES, IMAGE, SEEING, transformers_class
from tests.parity.gradient_cases import KEYS, OPTIMIZER, RECOMPUTE
from tests.parity.hf_cases import own_tensors
from tests.parity.layouts import release, shutdown

LAYOUTS = {  # by the number of ranks; without a layout all ranks are data-parallel
    1: [dict(budget=40), dict(padded=1), dict(shared=0, recompute=1)],
    2: [dict(), dict(tp=2), dict(pp=2, vpp=2), dict(cp=2), dict(ep=2)],  # sp: on four
    4: [dict(tp=2, sp=1, pp=2), dict(tp=2, sp=1, ep=2, etp=1)],
}
MORE = {  # of models that see; `flat`: with positions in one dimension, which has to differ
    1: [dict(frozen=1, recompute=1), dict(recompute=2), dict(flat=1)],
    2: [dict(dist=1, overlap=1, budget=40), dict(cp=2, dist=1, recompute=1)],
    4: [dict(tp=2, sp=1, cp=2), dict(pp=2, cp=2, budget=40)],
}
TEMPERATURE = 0.8


def layouts(config, ranks: int) -> list[dict]:
    return LAYOUTS[ranks] + (MORE[ranks] if sees(config) else [])


def mini_batch(config) -> Batch:
    """Six ragged responses to two prompts, and a weight for each of their tokens. With images also two responses to a
    prompt that has the ids of another, and other pixels."""
    generator = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(0, min(config.vocab_size, IMAGE), (count,), generator=generator).tolist()

    if sees(config):
        return seeing_batch(ids, generator)
    prompts = [ids(5), ids(9)]
    batch = Batch.of([prompts[i // 3] for i in range(6)], [ids(n) for n in (11, 3, 17, 24, 1, 8)])
    return weighted(batch.with_sequences(group=torch.arange(6) // 3), generator)


def weighted(batch: Batch, generator: torch.Generator) -> Batch:
    mask = (batch.response_ids != IMAGE).float()
    return batch.with_tokens(noise=torch.randn(len(mask), generator=generator) * mask, response_mask=mask)


def seeing_batch(ids, generator: torch.Generator) -> Batch:
    """The responses to the second prompt are episodes that were shown another image each."""
    one, two = [*ids(3), *[IMAGE] * 6, *ids(2)], [*[IMAGE] * 4, *ids(3), *[IMAGE] * 2, *ids(1)]
    prompts, keys = [one, one, two, ids(5)], [7, 8, 9, -1]
    owners = [0, 0, 1, 1, 2, 2, 3, 3]
    responses = [ids(n) for n in (11, 3, 17, 24, 1, 8, 5, 2)]
    responses[2][5:9] = responses[3][10:14] = [IMAGE] * 4
    batch = Batch.of([prompts[i] for i in owners], responses)
    group, keys = torch.tensor(owners), torch.tensor([keys[i] for i in owners])
    return weighted(batch.with_sequences(group=group, images=keys), generator)


class Pictures:
    """Images by key."""

    def __init__(self, config):
        tower = config.vision_config
        self.width = 3 * 2 * tower.patch_size**2

    def grids(self, key: int) -> list[tuple[int, int, int]]:
        return {8: [(1, 4, 6), (1, 4, 4)], 9: [(1, 4, 4), (1, 4, 2)]}.get(key, [(1, 4, 6)])

    def pixels(self, key: int) -> torch.Tensor:
        patches = sum(t * h * w for t, h, w in self.grids(key))
        return torch.randn(patches, self.width, generator=torch.Generator().manual_seed(key))

    def of_transformers(self, key: int, ids: torch.Tensor) -> dict:
        if key < 0:
            return {}
        sizes = torch.tensor(self.grids(key))
        seen = dict(pixel_values=self.pixels(key), image_grid_thw=sizes)
        return seen | dict(mm_token_type_ids=(ids == IMAGE).int())


class Weighted:
    """The loss: a weighted sum of log-probs."""

    def __init__(self, outputs, micro):
        weights_ = (micro.tokens["noise"] * micro.response_mask).to(outputs["logprobs"].device)
        self.total = (outputs["logprobs"] * weights_).sum()

    def mean(self, counts):
        return self.total

    def logged(self, *_):
        return {}


def reference(config, path: Path, batch: Batch, dtype=torch.float32):
    """transformers' (log-probs [R], entropies [R], gradients by name)."""
    model = transformers_class(config).from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
    logprobs, entropies = [], []
    for i in range(len(batch)):
        one = batch.select(torch.tensor([i]))
        ids = torch.cat([one.prompt_ids, one.response_ids])[None]
        seen = Pictures(config).of_transformers(int(one.images), ids) if sees(config) else {}
        logits = model(ids, **seen).logits[0, len(one.prompt_ids) - 1 : -1].float() / TEMPERATURE
        logits[:, never_sampled(config)] = -torch.inf
        found = logits.log_softmax(-1)
        own = found.gather(-1, one.response_ids[:, None])[:, 0]
        logprobs.append(own.where(one.response_mask > 0, 0.0))
        entropies.append(-(found.exp() * found.clamp(min=-1e30)).sum(-1) * one.response_mask)
    logprobs = torch.cat(logprobs)
    (logprobs * batch.tokens["noise"]).sum().backward()
    return logprobs.detach(), torch.cat(entropies).detach(), on_disk(model, config)


def known(config, path: Path, batch: Batch):
    """The reference of `path`, which a run on another number of ranks may have computed."""
    if not (file := path.with_suffix(".reference")).exists():
        torch.save(reference(config, path, batch), file)
    return torch.load(file)


def on_disk(model, config) -> dict[str, torch.Tensor]:
    """The gradients by the names of a checkpoint's tensors, as transformers saves them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
    model.save_pretrained(folder := Path(model.name_or_path + "-gradients"))
    if sees(config):  # whose names and experts transformers does not save as they are published
        stored = weights.open_folder(folder, config)
        return {name: stored(name) for name in hf_shapes(config)}
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


def computed(config, case: dict, path: Path, batch: Batch, precision="fp32"):
    """The actor's (log-probs [R], entropies [R], gradients by name, tensors that are not exported bit by bit)."""
    options = {KEYS[k]: v for k, v in case.items() if k in KEYS} | RECOMPUTE.get(case.get("recompute"), {})
    if "etp" in case:
        options["expert_tensor_parallel_size"] = case["etp"]
    options |= {"overlap_grad_reduce": True} if "overlap" in case else {}
    megatron = Megatron(sequence_parallel=bool(case.get("sp")), **options)
    parallel.initialize(megatron)
    budget = case.get("budget", 1000)
    batching = Batching(
        micro_batch_tokens=budget,
        forward_only_tokens=2 * budget,
        pack_sequences=not case.get("padded"),
        share_prompts="auto" if case.get("shared", 1) else "off",
    )
    optimizer = OPTIMIZER | dict(use_distributed_optimizer=bool(case.get("dist")))
    trained = sees(config) and not case.get("frozen")
    actor = Actor(
        config, megatron, batching, precision, temperature=TEMPERATURE, optimizer=optimizer, trains_tower=trained
    )
    if sees(config):
        actor.see(Pictures(config))
    folder = weights.open_folder(path, config)
    actor.load(folder)
    same = {name: torch.equal(tensor.cpu(), folder(name).to(tensor.dtype)) for name, tensor in actor.stream()}
    wrong = [name for name in same if not same[name]] + sorted(same.keys() ^ hf_shapes(config).keys())
    out = actor.outputs(batch, frozenset({"logprobs", "entropy"}))
    actor.backward(batch, Weighted, {})
    norm = actor.optimizer.grad_norm()
    if "dist" in case:
        gather_gradients(actor)
    with actor.use_weights([getattr(t, "main_grad", t).clone() for t in actor.tensors()]):
        gradients = {name: tensor.clone().cpu() for name, tensor in actor.stream()}
    release(actor)
    parallel.destroy_layout()
    gradients = {name: tensor.float() for name, tensor in gradients.items() if not name.endswith("correction_bias")}
    exact = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    if whole_experts(config) and abs(norm / exact - 1) > 1e-5 and precision == "fp32":
        wrong.append(f"the gradient's norm is {norm}, and not {exact}")
    return out["logprobs"], out["entropy"], gradients, wrong


def gather_gradients(actor) -> None:
    """With the distributed optimizer a rank has the sum over ranks of its own part of each bucket."""
    for buffer in (buffer for chunk in actor.chunks for buffer in chunk.buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            parts = list(bucket.grad_data.chunk(group.size()))
            dist.all_gather(parts, parts[group.rank()].clone(), group=group)


def compare(config, case: dict, path: Path, batch: Batch, expected) -> list:
    """[worst log-prob, worst entropy, worst gradient, its name, tensors that are not exported bit by bit]. Without
    `expected` nothing is compared."""
    flat = patch.object(images, "rope_positions", lambda ids, *_: torch.arange(len(ids)).expand(3, -1))
    with flat if "flat" in case else nullcontext():
        logprobs, entropy, gradients, wrong = computed(config, case, path, batch)
    if expected is None:
        return []
    if "frozen" in case:  # here are weights instead of gradients
        gradients = {name: gradient for name, gradient in gradients.items() if "visual." not in name}
    far = {name: relative(gradient, expected[2][name]) for name, gradient in gradients.items()}
    worst = max(far, key=far.get)
    return [relative(logprobs, expected[0]), relative(entropy, expected[1]), far[worst], worst, wrong]


def rounding(config, path: Path, batch: Batch, exact) -> list:
    """[log-probs, gradients]: the distance of bf16 from fp32, over that of transformers' bf16 from fp32."""
    own, theirs = computed(config, {}, path, batch, "bf16"), reference(config, path, batch, torch.bfloat16)

    def distances(found):
        norms = [(gradient.float() - exact[2][name]).norm() for name, gradient in found[2].items() if name in own[2]]
        return (found[0] - exact[0]).norm(), torch.stack(norms).norm()

    return [(ours / of_theirs).item() for ours, of_theirs in zip(distances(own), distances(theirs), strict=True)]


def possible(config, case: dict) -> bool:
    if sees(config) and "padded" in case:
        return False
    if case == dict(tp=2) and needs_sequence_parallel(config):
        return False
    return ("ep" not in case or bool(experts(config))) and ("cp" not in case or not whole_sequences(config))


def write_folder(path: Path, config) -> None:
    from megatron_rft.conversion import FolderWriter

    if parallel.rank() == 0 and not path.exists():
        writer = FolderWriter(path, shard_bytes=100_000)
        for name, tensor in own_tensors(config):
            stored_minus_one = family_of(config).zero_centred and "norm" in name and "linear_attn" not in name
            writer.add(name, tensor - 1 if stored_minus_one else tensor)
        writer.finish(config, None)
    dist.barrier()


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    parallel.initialize(Megatron())
    parallel.destroy_layout()
    for family in sys.argv[2:]:
        config, path = (FAMILIES | SEEING)[family], Path(sys.argv[1]) / family
        write_folder(path, config)
        batch = mini_batch(config)
        expected = known(config, path, batch) if parallel.rank() == 0 else None
        gc.collect(), gc.freeze()  # the end of a layout collects, and need not look at all that was imported
        for case in layouts(config, dist.get_world_size()):
            if not possible(config, case):
                continue
            if whole_experts(config):
                case = case | {"etp": 1} | ({"ep": 2} if "tp" in case else {})
            found = compare(config, case, path, batch, expected)
            if parallel.rank() == 0:
                print("CASE", family, *(f"{k}{v}" for k, v in case.items()), *found, sep="\t", flush=True)
        if dist.get_world_size() == 1:
            print("BF16", family, *rounding(config, path, batch, expected), sep="\t", flush=True)
    shutdown()


if __name__ == "__main__":
    main()
