"""Prompts with images in both engines, beside whole forward passes of transformers."""

from contextlib import closing

import pytest
import torch

from megatron_rft.conversion.folder import whole_config
from megatron_rft.inference.engine import Request, Sampling, checksum
from megatron_rft.inference.hf.engine import HFEngine, hf_views
from megatron_rft.plan.vllm import unusable
from megatron_rft.records import Prompt
from megatron_rft.utils.errors import DataError, RunFailed
from tests.families import IMAGE, SEEING, SEEING_WIDE, transformers_class
from tests.parity.hf_cases import own_tensors

VIDEO = 92
WITH_VLLM = [
    pytest.param(
        ("vllm", family), marks=[pytest.mark.slow, pytest.mark.skipif(unusable() is not None, reason=str(unusable()))]
    )
    for family in SEEING_WIDE
]


class Seen:
    """The images of a prompt."""

    def __init__(self, config, seed, *grids):
        self.grids, self.seed, self.width = grids, seed, 6 * config.vision_config.patch_size**2

    def pixels(self):
        patches = sum(t * h * w for t, h, w in self.grids)
        return torch.randn(patches, self.width, generator=torch.Generator().manual_seed(self.seed))

    @property
    def digests(self):
        return [f"{self.seed}, {number}: {self.grids}" for number in range(len(self.grids))]


def build(kind, family):
    if kind == "hf":
        return HFEngine(SEEING[family])
    from megatron_rft.inference.vllm.engine import VLLMEngine

    return VLLMEngine(SEEING_WIDE[family], max_batch_sequences=16)


@pytest.fixture(scope="module", params=[*(("hf", family) for family in SEEING), *WITH_VLLM], ids=" ".join)
def shared(request):
    """An engine, and a model of transformers."""
    with closing(build(*request.param)) as engine:
        yield engine, transformers_class(engine.config).from_config(whole_config(engine.config)).eval()


@pytest.fixture
def setting(shared):
    """The model and the engine with the same weights, and requests with no, one and two images."""
    engine, model = shared
    config = engine.config
    load(engine, model, dict(own_tensors(config)), version=1)
    one, two = Seen(config, 1, (1, 4, 6)), Seen(config, 2, (1, 4, 4), (1, 2, 4))
    prompts = [
        Prompt(0, (5, *[IMAGE] * 6, 6, 7), "", "", images=one),
        Prompt(1, (*[IMAGE] * 4, 9, *[IMAGE] * 2), "", "", images=two),
        Prompt(2, (3, 4, 5), "", "", images=Seen(config, 3)),
        Prompt(3, (5, *[IMAGE] * 6, 6, 7), "", "", images=Seen(config, 4, (1, 4, 6))),  # the first's ids, another image
    ]
    return model, engine, [Request(p.index, p.token_ids, 3, 7 + p.index, problem=p) for p in prompts]


def load(engine, model, tensors, version):
    engine.load_weights(tensors.items(), version)
    for name, view in hf_views(model, engine.config).items():
        view.copy_(tensors[name])


def largest_difference(model, request, response):
    ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
    images = request.problem.images
    seen = dict(pixel_values=images.pixels(), image_grid_thw=torch.tensor(images.grids)) if images.grids else {}
    whole = model(ids, mm_token_type_ids=(ids == IMAGE).int(), **seen).logits
    logits = whole[0, len(request.prompt_ids) - 1 : -1].index_fill(1, torch.tensor([IMAGE, VIDEO]), -torch.inf)
    expected = logits.log_softmax(-1).gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
    return (torch.tensor(response.logprobs) - expected).abs().max()


@torch.no_grad()
def assert_right(model, engine, requests, **sampling):
    for group in engine.generate(requests, Sampling(9, stop_token_ids=(2,), **sampling)):
        for response in group.responses:
            assert largest_difference(model, requests[group.id], response) < 1e-4
            assert not {IMAGE, VIDEO} & {*response.token_ids}


def test_logprobs_are_those_of_a_full_forward_pass(setting):
    assert_right(*setting)
    assert_right(*setting, continues=True)  # from vLLM's caches


def test_image_tokens_are_never_sampled(setting):
    model, engine, requests = setting
    tensors = dict(own_tensors(engine.config))
    head = "lm_head.weight" if "lm_head.weight" in tensors else next(name for name in tensors if "embed_tokens" in name)
    tensors[head][[IMAGE, VIDEO]] *= 50  # by far the most or the least probable ones
    load(engine, model, tensors, version=2)
    assert_right(model, engine, requests)


def test_another_image_gives_other_logprobs(setting):
    _, engine, requests = setting
    first = requests[0]

    def logprobs():
        (group,) = engine.generate([first], Sampling(4))
        return group.responses[0].logprobs

    before = logprobs()
    first.problem.images.seed += 1
    assert abs(before[0] - logprobs()[0]) > 1e-3


def test_after_a_sync_images_are_computed_with_the_new_tower(setting):
    model, engine, requests = setting
    assert_right(model, engine, requests)
    tensors = {name: tensor.flip(0) if "visual." in name else tensor for name, tensor in own_tensors(engine.config)}
    load(engine, model, tensors, version=2)
    assert engine.checksums() == {name: checksum(tensor) for name, tensor in tensors.items()}
    assert_right(model, engine, requests, continues=True)


def test_a_sync_proves_the_tower(setting):
    _, engine, _ = setting
    tensors = dict(own_tensors(engine.config))
    assert engine.checksums().keys() == tensors.keys() and any("visual." in name for name in tensors)
    tower = next(name for name in tensors if "visual." in name)
    with pytest.raises(RunFailed, match=f"{tower} is missing"):
        engine.load_weights(((name, tensor) for name, tensor in tensors.items() if name != tower), version=2)


def test_ids_that_do_not_fit_the_images_are_refused(setting):
    _, engine, requests = setting
    short = Request(0, requests[0].prompt_ids[2:], 1, 7, problem=requests[0].problem)
    with pytest.raises(DataError, match=r"runs of \[5\] image tokens"):
        list(engine.generate([short], Sampling(4)))
