"""Images in packed micro-batches: positions beside transformers', features, and what is refused."""

import copy
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

import megatron_rft.megatron  # noqa: F401  prepares megatron-core for this host
from megatron_rft.config import Batching, Megatron, load
from megatron_rft.config.lora import Lora
from megatron_rft.conversion import lora
from megatron_rft.conversion.folder import whole_config
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, vision
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.images import Images, rope_positions
from megatron_rft.megatron.packing import PackLayout, SharedPrompts, pack
from megatron_rft.plan.checks import check_model
from megatron_rft.plan.layout import Layout
from megatron_rft.plan.memory import state_of
from megatron_rft.plan.model_shape import ModelShape
from megatron_rft.records import Batch
from megatron_rft.utils.errors import ConfigError, DataError
from tests.families import IMAGE, SEEING, transformers_class
from tests.unit.plan.test_memory import path  # noqa: F401

CPU = torch.device("cpu")


class Pictures:
    """By key: one image of 2 x 3 tokens, or two of 2 x 2 and 1 x 2. Pixels say which image they are of."""

    asked = []

    def grids(self, key):
        return [(1, 4, 6)] if key == 1 else [(1, 4, 4), (1, 2, 4)]

    def pixels(self, key):
        self.asked.append(key)
        return torch.full((sum(t * h * w for t, h, w in self.grids(key)), 1), float(key))


ONE, TWO = [5, *[IMAGE] * 6, 6], [*[IMAGE] * 4, 9, *[IMAGE] * 2, 7, 8]


@pytest.fixture
def ranks():
    parallel.initialize(Megatron())
    yield
    parallel.shutdown()


@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize("case", [(ONE, 1), (TWO, 2), ([1, 2, *TWO, *ONE[:1]], 2)])
def test_positions_are_those_of_transformers(family, case):
    ids, key = case
    grids = Pictures().grids(key)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(whole_config(SEEING[family])).model
    tokens = torch.tensor(ids)[None]
    expected, _ = model.get_rope_index(tokens, (tokens == IMAGE).int(), torch.tensor(grids))
    assert torch.equal(rope_positions(tokens[0], grids, IMAGE, 2), expected[:, 0])


def test_an_image_by_hand():
    found = rope_positions(torch.tensor([5, *[IMAGE] * 6, 6, 7]), [(1, 4, 6)], IMAGE, 2)
    assert found.tolist() == [[0, 1, 1, 1, 1, 1, 1, 4, 5], [0, 1, 1, 1, 2, 2, 2, 4, 5], [0, 1, 2, 3, 1, 2, 3, 4, 5]]


@pytest.mark.parametrize("ids", [[5], [IMAGE] * 5, [IMAGE] * 7, [IMAGE, 5, *[IMAGE] * 5]])
def test_image_tokens_that_are_not_those_of_the_images_are_refused(ids):
    with pytest.raises(DataError, match=r"has runs of .* image tokens, and its images \[\(1, 4, 6\)\] need \[6\]"):
        rope_positions(torch.tensor(ids), [(1, 4, 6)], IMAGE, 2)


def batch(*prompts, keys):
    responses = [[20 + i, 30 + i, 40 + i] for i in range(len(prompts))]
    return Batch.of(prompts, responses, sequences={"images": torch.tensor(keys)})


@pytest.mark.parametrize("shared", [True, False])
def test_a_prompts_images_are_computed_once(shared):
    pictures = Pictures()
    pictures.asked = []
    images = Images(pictures, IMAGE, 2, True)
    micro = pack(batch(ONE, ONE, [9], keys=[1, 1, -1]), PackLayout(share_prompts=shared), CPU, None, images)
    seen = micro.packed.seen
    assert isinstance(micro.packed, SharedPrompts) == shared and pictures.asked == [1]
    assert seen.grids.tolist() == [[1, 4, 6]] and len(seen.pixels) == 24
    assert seen.cells.tolist() == [*range(1, 7), *([] if shared else range(11, 17))]
    assert seen.features.tolist() == [*range(6)] * (1 if shared else 2)
    first = [0, 1, 1, 1, 2, 2, 2, 4, 5, 6]
    assert micro.packed.position_ids[1].tolist() == [*first, *(first[8:] if shared else first), 0, 1, 2]


def test_prompts_with_the_same_tokens_and_other_images_are_not_shared():
    pictures = Pictures()
    both = batch(ONE, [*ONE], keys=[1, 3])
    pictures.grids = lambda key: [(1, 4, 6)]
    micro = pack(both, PackLayout(share_prompts=True), CPU, None, Images(pictures, IMAGE, 2, True))
    assert (
        not isinstance(micro.packed, SharedPrompts) and micro.packed.seen.pixels[:, 0].tolist() == [1] * 24 + [3] * 24
    )
    assert micro.packed.seen.features.tolist() == [*range(12)]


def test_later_stages_need_no_pixels():
    pictures = Pictures()
    pictures.pixels = None
    micro = pack(batch(TWO, keys=[2]), PackLayout(), CPU, None, Images(pictures, IMAGE, 2, False))
    assert micro.packed.seen.pixels is None and micro.packed.position_ids.shape == (3, 11)


def test_an_image_token_in_a_response_is_refused():
    given = Batch.of([ONE], [[4, IMAGE, 3]], sequences={"images": torch.tensor([1])})
    with pytest.raises(DataError, match=r"has runs of \[6, 1\] image tokens"):
        pack(given, PackLayout(), CPU, None, Images(Pictures(), IMAGE, 2, True))


@pytest.mark.parametrize("option", ["batching.pack_sequences=false", "model.precision=fp8"])
def test_the_plan_refuses_what_is_not_exact(path, option):  # noqa: F811
    (path.parent / "model/config.json").write_text(json.dumps(whole_config(SEEING["qwen2_5_vl"]).to_dict()))
    assert check_model(load(path))[0].tower
    with pytest.raises(ConfigError, match="a model that reads images needs batching.pack_sequences true, and no fp8"):
        check_model(load(path, [option]))


def test_deep_features_need_their_layers_on_the_first_stage(ranks):
    config = copy.deepcopy(SEEING["qwen3_vl"])
    config.vision_config.deepstack_visual_indexes = [0, 1, 2]
    config.num_hidden_layers = 2
    with pytest.raises(ConfigError, match="enter the first 3 layers, and the first pipeline stage has only 2"):
        models.build(config, Megatron(), "fp32")


@pytest.mark.parametrize("family", SEEING)
def test_a_micro_batch_without_images_gives_a_trained_tower_zeros(ranks, family):
    config = SEEING[family]
    (model,) = models.build(config, Megatron(), "fp32", trains_tower=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    ids, positions = torch.arange(6)[None], torch.arange(6)[None]
    model(ids, positions, None).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.visual.parameters())
    assert model.embedding.word_embeddings.weight.grad.any()


def test_a_tower_in_bf16_keeps_its_frequencies(ranks):
    actor = Actor(SEEING["qwen2_5_vl"], Megatron(), Batching(), "bf16")
    found = [m.inv_freq for m in actor.models[0].visual.modules() if hasattr(m, "inv_freq")]
    assert found and all(each.dtype is torch.float32 for each in found)
    assert actor.models[0].visual.dtype is torch.bfloat16


@pytest.mark.parametrize(("family", "axes"), [("qwen2_5_vl", [0, 1, 1, 2]), ("qwen3_vl", [0, 1, 2, 0, 1, 2, 0, 0])])
def test_the_axis_of_each_frequency(family, axes):
    assert vision.rotary_axes(SEEING[family]).tolist() == axes


@pytest.mark.parametrize("vision_", ["frozen", "trained", "adapters"])
@pytest.mark.parametrize("family", SEEING)
def test_the_plan_counts_the_tower(ranks, tmp_path, family, vision_):
    """Bytes of weights and gradients, beside those of a model that is built."""
    config = SEEING[family]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"run: {{output_dir: {tmp_path}/out, steps: 2}}\nmodel: {{path: m, precision: fp32}}\n"
        "data: {train: examples/quickstart/arithmetic.py:rows}\noptimizer: {use_distributed_optimizer: false}\n"
    )
    option = "lora={rank: 4, targets: [vision]}" if vision_ == "adapters" else f"model.vision={vision_}"
    given = load(recipe, [option])
    kinds = {"trains_tower": vision_ == "trained", "lora": given.lora}
    actor = Actor(config, Megatron(), Batching(), "fp32", optimizer={"lr": 1.0}, **kinds)
    found = state_of(given, ModelShape(whole_config(config).to_dict()), Layout(1, 1, 1, 1, 1, 1), 0)
    assert found.weights == sum(tensor.nbytes for tensor in actor.tensors(frozen=True))
    trained = [tensor for tensor in actor.tensors(frozen=True) if tensor.requires_grad]
    assert found.gradients == sum(tensor.nbytes for tensor in trained)
    assert any(tensor is actor.models[0].visual.patch_embed.proj.weight for tensor in trained) == (vision_ == "trained")


@pytest.mark.parametrize("targets", [["attention", "mlp"], ["vision"], ["attention", "vision"]])
@pytest.mark.parametrize("family", SEEING)
def test_a_folder_of_adapters_has_transformers_names(tmp_path, family, targets):
    config, options = SEEING[family], Lora(rank=2, targets=targets)
    given = {name: torch.randn(shape) for name, shape in lora.shapes(config, options).items()}
    lora.write(tmp_path, given.items(), options, config, "base", "print")
    stored = load_file(tmp_path / lora.TENSORS)
    prefixes = {name.removeprefix("base_model.model.model.").partition(".")[0] for name in stored}
    assert prefixes == {"visual" if target == "vision" else "language_model" for target in targets}
    read = lora.read(tmp_path, options, config, "print")
    assert len(stored) == len(given) and all(torch.equal(read(name), tensor) for name, tensor in given.items())
    with torch.device("meta"):
        model = transformers_class(config).from_config(whole_config(config))
    adapted = get_peft_model(model, LoraConfig.from_pretrained(tmp_path))
    names = {n.replace(".default", "") for n, _ in adapted.named_parameters() if "lora_" in n}
    assert names == stored.keys()
