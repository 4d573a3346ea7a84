"""Prompts with images in the hf engine, beside whole forward passes of transformers."""

import pytest
import torch

from megatron_rft.conversion.folder import whole_config
from megatron_rft.inference.engine import Request, Sampling
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.records import Prompt
from megatron_rft.utils.errors import RunFailed
from tests.families import IMAGE, SEEING, transformers_class
from tests.parity.hf_cases import own_tensors

VIDEO = 92


class Seen:
    """The images of a prompt."""

    def __init__(self, config, seed, *grids):
        self.grids, self.seed, self.width = grids, seed, 6 * config.vision_config.patch_size**2

    def pixels(self):
        patches = sum(t * h * w for t, h, w in self.grids)
        return torch.randn(patches, self.width, generator=torch.Generator().manual_seed(self.seed))


@pytest.fixture(params=SEEING)
def setting(request, tmp_path):
    """A model of transformers, an engine with the same weights, and requests with no, one and two images."""
    config = SEEING[request.param]
    model = transformers_class(config).from_config(whole_config(config)).eval()
    engine = HFEngine(config)
    engine.load_weights(own_tensors(config), version=1)
    model.load_state_dict(engine.model.state_dict())
    one, two = Seen(config, 1, (1, 4, 6)), Seen(config, 2, (1, 4, 4), (1, 2, 4))
    prompts = [
        Prompt(0, (5, *[IMAGE] * 6, 6, 7), "", "", images=one),
        Prompt(1, (*[IMAGE] * 4, 9, *[IMAGE] * 2), "", "", images=two),
        Prompt(2, (3, 4, 5), "", "", images=Seen(config, 3)),
    ]
    return model, engine, [Request(p.index, p.token_ids, 3, 7 + p.index, problem=p) for p in prompts]


@torch.no_grad()
def test_logprobs_are_those_of_a_full_forward_pass(setting):
    model, engine, requests = setting
    groups = {group.id: group.responses for group in engine.generate(requests, Sampling(9, stop_token_ids=(2,)))}
    for request in requests:
        for response in groups[request.id]:
            ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
            images = request.problem.images
            seen = dict(pixel_values=images.pixels(), image_grid_thw=torch.tensor(images.grids)) if images.grids else {}
            logits = model(ids, mm_token_type_ids=(ids == IMAGE).int(), **seen).logits[
                0, len(request.prompt_ids) - 1 : -1
            ]
            logits[:, [IMAGE, VIDEO]] = -torch.inf
            expected = logits.log_softmax(-1).gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
            assert (torch.tensor(response.logprobs) - expected).abs().max() < 1e-4
            assert not {IMAGE, VIDEO} & {*response.token_ids}


def test_another_image_gives_other_logprobs(setting):
    _, engine, requests = setting
    first = requests[0]

    def logprobs():
        (group,) = engine.generate([first], Sampling(4))
        return group.responses[0].logprobs

    before = logprobs()
    first.problem.images.seed += 1
    assert abs(before[0] - logprobs()[0]) > 1e-3


def test_a_sync_proves_the_tower(setting):
    _, engine, _ = setting
    config = engine.config
    tensors = dict(own_tensors(config))
    assert engine.checksums().keys() == tensors.keys() and any("visual." in name for name in tensors)
    tower = next(name for name in tensors if "visual." in name)
    with pytest.raises(RunFailed, match=f"{tower} is missing"):
        engine.load_weights(((name, tensor) for name, tensor in tensors.items() if name != tower), version=2)
