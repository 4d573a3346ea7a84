"""The engine against the model's own forward pass and transformers' generate, on real tiny models."""

import random

import numpy as np
import pytest
import torch
from transformers import GemmaConfig, Qwen2Config

from megatron_rft.conversion.convert import SourceCheckpoint
from megatron_rft.families.shapes import experts
from megatron_rft.inference.engine import Request, Sampling, checksum
from megatron_rft.inference.hf import attention, decoder
from megatron_rft.inference.hf.engine import HFEngine
from megatron_rft.inference.hf.routes import Routes
from megatron_rft.utils.errors import DataError, RunFailed, UserError
from tests.unit.inference.tiny import CONFIGS, SHAPE, assert_supports, build_engine, build_model, hf_stream

STOP = 2


def some_requests(count: int, n: int = 3, **named) -> list[Request]:
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, 64) for _ in range(rng.randint(1, 20))) for _ in range(count)]
    return [Request(i, prompt, n, seed=100 + i, **named) for i, prompt in enumerate(prompts)]


def answers(engine: HFEngine, requests: list[Request], sampling: Sampling) -> dict:
    groups = list(engine.generate(requests, sampling))
    assert sorted(group.id for group in groups) == sorted(request.id for request in requests)
    return {group.id: group.responses for group in groups}


def replay(model, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float = 1.0) -> torch.Tensor:
    """[R] log-probs of a response from one full forward pass."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("family", CONFIGS)
def test_logprobs_are_those_of_a_full_forward_pass(family, monkeypatch):
    monkeypatch.setattr(decoder, "PREFILL_TOKENS", 15)  # the prompts of a wave are computed in several parts
    monkeypatch.setattr(attention, "ROOM", 3)  # the cache grows several times
    model = build_model(family)
    requests, mixture = some_requests(6), bool(experts(model.config))
    sampling = Sampling(30, temperature=0.8, stop_token_ids=tuple(range(2, 8)), routes=mixture)
    found = answers(build_engine(model, rows=8), requests, sampling)  # 18 rows in waves of 8
    whole = Routes(model)
    lengths = set()
    for request in requests:
        assert len(found[request.id]) == 3
        for response in found[request.id]:
            expected = replay(model, request.prompt_ids, response.token_ids, temperature=0.8)
            torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-5, rtol=0)
            assert response.weight_version == 3
            if mixture:
                used = whole.last().numpy()[:-1]
                assert np.array_equal(np.sort(response.routes), np.sort(used)), "experts of another token or layer"
            lengths.add(len(response.token_ids))
    assert len(lengths) > 3, "the rows should have ended at different times"


def test_one_bias_for_all_layers_gives_what_transformers_masks_give(engine, monkeypatch):
    given, sampling, rows, share = some_requests(5), Sampling(max_tokens=12), [], attention.InPlaceLayer.share
    monkeypatch.setattr(
        attention.InPlaceLayer, "share", lambda self, kept: (rows.append(len(kept.own)), share(self, kept))
    )
    ours = answers(engine, given, sampling)
    assert rows == [3 * 5] * engine.model.config.num_hidden_layers, "the rows of a prompt share its keys"
    assert engine.takes_bias
    monkeypatch.setattr(attention, "takes_bias", lambda *_: False)
    for id, theirs in answers(build_engine(engine.model), given, sampling).items():
        for one, other in zip(ours[id], theirs, strict=True):
            assert one.token_ids == other.token_ids and np.allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_layers_that_see_less_keep_their_own_masks():
    windows = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    assert not attention.takes_bias(windows, torch.float32)
    assert not attention.takes_bias(CONFIGS["qwen3_5"], torch.float32)  # linear attention
    assert not attention.takes_bias(CONFIGS["qwen3"], torch.bfloat16)


def test_responses_of_truncated_sampling_carry_their_supports(model):
    """Log-probs are those over the support, which holds the token."""
    requests, sampling = some_requests(6), Sampling(30, 0.1, top_p=0.9, top_k=5, stop_token_ids=(STOP,))
    assert_supports(model, requests, answers(build_engine(model, rows=8), requests, sampling), sampling)


def test_a_response_does_not_depend_on_the_others(model, engine):
    requests, sampling = some_requests(6, n=4), Sampling(12, stop_token_ids=(STOP,))
    together = answers(engine, requests, sampling)
    tokens = {id: [r.token_ids for r in responses] for id, responses in together.items()}
    assert len({each for responses in tokens.values() for each in responses}) > 20, "streams should differ"
    for other in (build_engine(model, rows=3), build_engine(model, rows=9)):
        backwards = answers(other, requests[::-1], sampling)
        assert {id: [r.token_ids for r in responses] for id, responses in backwards.items()} == tokens
    for request in requests[:2]:
        alone = Request(request.id, request.prompt_ids, 2, request.seed)
        assert [r.token_ids for r in answers(engine, [alone], sampling)[request.id]] == tokens[request.id][:2]


def test_greedy_equals_generate(model, engine):
    requests = some_requests(5, n=2)
    found = answers(engine, requests, Sampling(20, temperature=0))
    for request in requests:
        prompt = torch.tensor([request.prompt_ids])
        expected = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, eos_token_id=None
        )[0, prompt.shape[1] :]
        for response in found[request.id]:
            assert response.token_ids == tuple(expected.tolist())
            logprobs = replay(model, request.prompt_ids, response.token_ids)
            torch.testing.assert_close(torch.tensor(response.logprobs), logprobs, atol=1e-5, rtol=0)


def test_stop_tokens_and_limits(engine):
    requests = some_requests(12, n=4) + [Request(99, (5, 6), 4, seed=1, max_tokens=3)]
    found = answers(engine, requests, Sampling(12, stop_token_ids=(2, 7, 11)))
    reasons = set()
    for id, responses in found.items():
        for response in responses:
            most = 3 if id == 99 else 12
            reasons.add(response.finish_reason)
            assert len(response.token_ids) == len(response.logprobs) <= most
            assert not set(response.token_ids[:-1]) & {2, 7, 11}
            ended = response.token_ids[-1] in (2, 7, 11)
            assert response.finish_reason == ("stop" if ended else "length")
            assert ended or len(response.token_ids) == most
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("rows", [64, 9])
def test_rows_and_groups_that_leave_before_any_decoding(model, engine, rows):
    """Half of the vocabulary ends a response, so rows and whole groups leave at once, some before any decoding."""
    requests, sampling = some_requests(24, n=3), Sampling(8, stop_token_ids=tuple(range(32)))
    found = answers(build_engine(model, rows), requests, sampling)
    assert sum(len(r.token_ids) == 1 for responses in found.values() for r in responses) > 8
    for request in requests:
        alone = answers(engine, [request], sampling)[request.id]
        assert [r.token_ids for r in found[request.id]] == [r.token_ids for r in alone]
        for response in found[request.id]:
            expected = replay(model, request.prompt_ids, response.token_ids)
            torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=1e-5, rtol=0)


def test_more_samples_than_places(model, engine):
    request, sampling = Request(4, (9, 8, 7), 11, seed=6), Sampling(9)
    expected = [r.token_ids for r in answers(engine, [request], sampling)[4]]
    assert [r.token_ids for r in answers(build_engine(model, rows=4), [request], sampling)[4]] == expected


def test_an_abandoned_iterator_leaves_the_engine_usable(engine):
    requests, sampling = some_requests(5), Sampling(10, stop_token_ids=(STOP,))
    expected = answers(engine, requests, sampling)
    iterator = engine.generate(requests, sampling)
    next(iterator)
    iterator.close()
    assert answers(engine, requests, sampling) == expected
    assert list(engine.generate([], sampling)) == []


def test_requests_the_model_cannot_serve(engine):
    with pytest.raises(UserError, match=r"prompt of 200 tokens \+ up to 57 response tokens = 257, but.* 256 positions"):
        list(engine.generate([Request(0, (5,) * 200, 1, 0)], Sampling(57)))
    with pytest.raises(UserError, match="empty prompt"):
        list(engine.generate([Request(0, (), 1, 0)], Sampling(5)))
    with pytest.raises(DataError, match="token id 64 in a vocabulary of 64"):
        list(engine.generate([Request(0, (64,), 1, 0)], Sampling(5)))


def test_families_it_does_not_know():
    with pytest.raises(DataError, match="model_type 'gemma' is not supported"):
        HFEngine(GemmaConfig())
    windows = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(DataError, match="sliding-window"):
        HFEngine(windows)


def test_no_generation_without_weights():
    engine = HFEngine(CONFIGS["qwen3"])
    with pytest.raises(RunFailed, match="before any weights"):
        list(engine.generate(some_requests(1), Sampling(3)))


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_arrive_in_place_and_exactly(family, tmp_path):
    model = build_model(family, seed=1)
    engine = build_engine(build_model(family, seed=0))
    before = {name: parameter.data_ptr() for name, parameter in engine.model.named_parameters()}
    engine.load_weights(hf_stream(model), version=8)
    assert {name: parameter.data_ptr() for name, parameter in engine.model.named_parameters()} == before
    assert engine.checksums() == {name: checksum(tensor) for name, tensor in hf_stream(model)}
    assert next(engine.generate(some_requests(1), Sampling(3))).responses[0].weight_version == 8
    model.save_pretrained(tmp_path)
    engine.load_weights(SourceCheckpoint(tmp_path, "hf", model.config, tmp_path).tensors(), version=9)
    assert engine.checksums() == {name: checksum(tensor) for name, tensor in hf_stream(model)}


def spoiled(model, spoil) -> list:
    return [pair for name, tensor in hf_stream(model) for pair in spoil(name, tensor)]


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
FAULTS = {
    "twice": (lambda n, t: [(n, t)] * (2 if n == NORM else 1), f"{NORM} came twice"),
    "missing": (lambda n, t: [] if n == NORM else [(n, t)], rf"{NORM} is missing \(1 of \d+ tensors"),
    "unknown": (lambda n, t: [(n + ".bias" if n == NORM else n, t)], f"{NORM}.bias is no tensor of this qwen3 model"),
    "tied": (lambda n, t: [(n, t)] + [("lm_head.weight", t)] * ("embed" in n), "lm_head.weight is no tensor"),
    "shape": (
        lambda n, t: [(n, t[:-1] if n == QUERY else t)],
        rf"{QUERY} has shape \(47, 32\), the engine's has \(48,",
    ),
    "nan": (lambda n, t: [(n, t.fill_(torch.nan) if n == NORM else t)], f"{NORM} has non-finite"),
    "zero": (lambda n, t: [(n, t.zero_() if n == QUERY else t)], f"{QUERY} is all zero, and was not before"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_stream_is_refused_and_read_to_its_end(model, engine, fault):
    spoil, message = FAULTS[fault]
    stream = iter(spoiled(model, spoil))
    with pytest.raises(RunFailed, match=message):
        engine.load_weights(stream, version=4)
    assert next(stream, None) is None
    with pytest.raises(RunFailed, match="before any weights"):
        list(engine.generate(some_requests(1), Sampling(3)))
    engine.load_weights(hf_stream(model), version=5)
    assert engine.weight_version == 5


def test_the_callers_config_is_not_changed():
    config = Qwen2Config(**SHAPE)
    before = config._attn_implementation
    HFEngine(config)
    assert config._attn_implementation == before


def test_bf16_weights_are_cast(model):
    engine = HFEngine(model.config, dtype=torch.bfloat16)
    engine.load_weights(hf_stream(model), version=0)
    assert engine.checksums() == {name: checksum(tensor.bfloat16()) for name, tensor in hf_stream(model)}
    request = Request(0, (5, 6, 7), 2, seed=3)
    for response in next(engine.generate([request], Sampling(10))).responses:
        expected = replay(model, request.prompt_ids, response.token_ids)
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=0.3, rtol=0)


def test_close_twice(engine):
    engine.close()
    engine.close()
