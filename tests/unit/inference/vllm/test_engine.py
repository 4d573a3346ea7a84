"""The vLLM engine against the model's own forward pass, and streams with faults. All tests share one engine."""

import gc
import math
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice

import pytest
import torch
from transformers import MiniMaxM2Config, Qwen3Config

from megatron_rft.inference import weight_sync
from megatron_rft.inference.engine import Request, Sampling, checksum
from megatron_rft.inference.vllm.arguments import kept_tokens
from megatron_rft.plan.vllm import unusable
from megatron_rft.training.engines import COPIES
from megatron_rft.utils.errors import ConfigError, DataError, RunFailed, UserError
from tests.shapes import sizes
from tests.unit.inference.tiny import SHAPE, assert_supports, build_model, hf_stream

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))

STOP = 2
CONFIG = Qwen3Config(**SHAPE | dict(vocab_size=100), head_dim=32, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def models():
    """The same architecture with two sets of weights."""
    return [build_model(CONFIG, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def shared(models):
    from megatron_rft.inference.vllm.engine import VLLMEngine

    pytest.importorskip("llvmlite.binding")  # as after n-grams: vLLM's start falls over it (vllm_cpu.py)
    engine = VLLMEngine(CONFIG, max_batch_sequences=32)
    with pytest.raises(RunFailed, match="before any weights"):
        list(engine.generate(some_requests(1), Sampling(3)))
    yield engine
    engine.close()
    engine.close()


@pytest.fixture
def engine(shared, models):
    shared.load_weights(hf_stream(models[0]), version=3)
    return shared


def some_requests(count: int, n: int = 3, **named) -> list[Request]:
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(3, 100) for _ in range(rng.randint(1, 20))) for _ in range(count)]
    return [Request(i, prompt, n, seed=100 + i, **named) for i, prompt in enumerate(prompts)]


def answers(engine, requests: list[Request], sampling: Sampling) -> dict:
    groups = list(engine.generate(requests, sampling))
    assert sorted(group.id for group in groups) == sorted(request.id for request in requests)
    return {group.id: group.responses for group in groups}


def tokens(found: dict) -> dict:
    return {id: [response.token_ids for response in responses] for id, responses in found.items()}


def replay(model, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float = 1.0) -> torch.Tensor:
    """[R, V] log-probs along a response from one full forward pass."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 0.0])
def test_logprobs_are_those_of_a_full_forward_pass(engine, models, temperature):
    requests, sampling = some_requests(12, n=4), Sampling(20, temperature, stop_token_ids=(STOP, 7, 11))
    found, lengths = answers(engine, requests, sampling), set()
    for request in requests:
        assert len(found[request.id]) == 4
        for response in found[request.id]:
            expected = replay(models[0], request.prompt_ids, response.token_ids, temperature or 1.0)
            chosen = expected.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(response.logprobs), chosen, atol=1e-4, rtol=0)
            assert temperature or (expected.max(-1).values - chosen).max() < 1e-5
            assert response.weight_version == 3
            ended = response.token_ids[-1] in (STOP, 7, 11)
            assert response.finish_reason == ("stop" if ended else "length")
            assert ended or len(response.token_ids) == 20
            assert not set(response.token_ids[:-1]) & {STOP, 7, 11}
            lengths.add(len(response.token_ids))
    assert len(lengths) > 3 or temperature == 0


def test_responses_of_truncated_sampling_carry_their_supports(engine, models):
    requests, sampling = some_requests(12, n=4), Sampling(20, 0.1, top_p=0.9, top_k=5, stop_token_ids=(STOP,))
    assert_supports(models[0], requests, answers(engine, requests, sampling), sampling)


def test_candidates_that_do_not_hold_the_distribution_are_refused():
    """Four tokens of probability 1/4 tie at top_k 1, and two log-probs were asked for."""
    quarter = math.log(0.25)
    with pytest.raises(RunFailed, match="2 most probable tokens have 0.5000 .* rollout.top_k"):
        kept_tokens([(5, quarter), (7, quarter), (9, -9999.0)])
    assert kept_tokens([(5, quarter), (5, quarter), (7, math.log(0.75)), (9, -math.inf)]) == (5, 7)


def test_a_response_is_a_function_of_its_seed(engine):
    requests, sampling = some_requests(6, n=4), Sampling(12, stop_token_ids=(STOP,))
    together = tokens(answers(engine, requests, sampling))
    assert len({each for responses in together.values() for each in responses}) > 20, "streams should differ"
    assert tokens(answers(engine, requests[::-1], sampling)) == together
    for request in requests[:2]:
        alone = Request(request.id, request.prompt_ids, 2, request.seed)
        assert tokens(answers(engine, [alone], sampling))[request.id] == together[request.id][:2]


def test_limits_of_one_request_and_groups_as_they_end(engine):
    requests = [*some_requests(4, n=2), Request(99, (5, 6), 2, seed=1, max_tokens=3)]
    groups = list(engine.generate(requests, Sampling(30)))
    assert groups[0].id == 99 and {len(r.token_ids) for r in groups[0].responses} == {3}
    assert all(len(r.token_ids) == 30 for group in groups[1:] for r in group.responses)


def test_an_abandoned_iterator_leaves_the_engine_usable(engine):
    requests, sampling = some_requests(40), Sampling(10, stop_token_ids=(STOP,))
    expected = tokens(answers(engine, requests, sampling))
    iterator = engine.generate(requests, sampling)
    next(iterator)
    iterator.close()
    assert tokens(answers(engine, requests, sampling)) == expected
    assert list(engine.generate([], sampling)) == []


def test_requests_it_cannot_serve(engine):
    with pytest.raises(
        UserError, match=r"prompt of 200 tokens \+ up to 57 response tokens = 257, but .* built for 256"
    ):
        list(engine.generate([Request(0, (5,) * 200, 1, 0)], Sampling(57)))
    with pytest.raises(UserError, match="empty prompt"):
        list(engine.generate([Request(0, (), 1, 0)], Sampling(5)))
    with pytest.raises(DataError, match="token id 100 in a vocabulary of 100"):
        list(engine.generate([Request(0, (100,), 1, 0)], Sampling(5)))


def test_the_trainers_random_numbers_are_not_touched(shared, engine):
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    answers(engine, some_requests(3), Sampling(5))
    assert torch.equal(torch.rand(3), expected)


def test_a_closed_engine_can_be_collected_and_what_was_frozen_stays_so():
    from megatron_rft.inference.vllm.engine import VLLMEngine

    gc.freeze()
    frozen = gc.get_freeze_count()
    engine = VLLMEngine(CONFIG, max_batch_sequences=4)
    model = weakref.ref(engine._model())
    engine.close()
    del engine
    gc.collect()
    assert model() is None and gc.get_freeze_count() > 0.9 * frozen  # some end with their last reference


# --- weights


def test_a_prompt_is_computed_anew_with_new_weights(engine, models):
    """The prefix cache must not outlive the weights: this prompt fills a block of it."""
    request = Request(0, tuple(range(3, 63)) * 3, 1, seed=0)
    for version, model in enumerate([models[1], models[0]], 4):
        engine.load_weights(hf_stream(model), version)
        (response,) = answers(engine, [request], Sampling(8, temperature=0))[0]
        expected = replay(model, request.prompt_ids, response.token_ids)
        assert (expected.max(-1).values - torch.tensor(response.logprobs)).abs().max() < 1e-4
        assert response.weight_version == version


@pytest.mark.parametrize("seed", [1, 0])
def test_a_sync_is_compared_bit_by_bit(shared, models, seed):
    weight_sync.send(hf_stream(models[seed]), shared, version=5 + seed, verify=True)
    assert shared.weight_version == 5 + seed


NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
FAULTS = {
    "dropped": (lambda n, t: [] if n == QUERY else [(n, t)], rf"{QUERY} is missing \(1 of \d+ tensors"),
    "twice": (lambda n, t: [(n, t)] * (2 if n == NORM else 1), f"{NORM} came twice"),
    "unknown": (lambda n, t: [(n + ".bias" if n == NORM else n, t)], f"{NORM}.bias is no tensor of this qwen3 model"),
    "shape": (lambda n, t: [(n, t[:-1] if n == QUERY else t)], rf"{QUERY} has shape \(127, 32\), the engine's"),
    "nan": (lambda n, t: [(n, t.fill_(torch.nan) if n == NORM else t)], f"{NORM} has non-finite"),
    "zero": (lambda n, t: [(n, t.zero_() if n == QUERY else t)], f"{QUERY} is all zero, and was not before"),
    "dtype": (
        lambda n, t: [(n, t.bfloat16() if n == QUERY else t)],
        f"{QUERY} is torch.bfloat16; it was torch.float32",
    ),
    "whole": (lambda n, t: [(n, t.int() if n == QUERY else t)], f"{QUERY} is torch.int32; it was torch.float32"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_stream_is_refused_and_read_to_its_end(engine, models, fault):
    spoil, message = FAULTS[fault]
    stream = iter([pair for name, tensor in hf_stream(models[1]) for pair in spoil(name, tensor)])
    with pytest.raises(RunFailed, match=message):
        engine.load_weights(stream, version=4)
    assert next(stream, None) is None
    with pytest.raises(RunFailed, match="before any weights"):
        list(engine.generate(some_requests(1), Sampling(3)))
    weight_sync.send(hf_stream(models[1]), engine, version=5, verify=True)
    assert engine.weight_version == 5


@pytest.mark.parametrize("count", [0, 3])
def test_an_update_that_a_lost_trainer_has_left_is_ended(engine, models, count):
    """By a server's worker, when the next trainer asks for its facts: until then vLLM refuses to begin another one."""
    from megatron_rft.inference.vllm.worker_extension import Extension

    engine.llm.collective_rpc("start_weight_update")
    if count:  # a part of the matrix that vLLM makes of three
        tensors = {"tensors": islice(hf_stream(models[1]), count)}
        engine.llm.collective_rpc("update_weights", kwargs={"update_info": tensors})
    with pytest.raises(RuntimeError, match="while a weight update is already active"):
        engine.load_weights(hf_stream(models[1]), version=6)
    (facts,) = engine.llm.collective_rpc(Extension.rft_facts)
    assert (facts["transfer"], facts["sequences"], facts["max_model_len"]) == ("handover", 32, 256)
    weight_sync.send(hf_stream(models[1]), engine, version=6, verify=True)


def swapped(stream):
    """Two tensors of one shape with exchanged names."""
    pairs = dict(stream)
    first, second = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
    pairs[first], pairs[second] = pairs[second], pairs[first]
    return pairs.items()


def test_a_swapped_pair_is_found_by_the_comparison(engine, models, monkeypatch):
    load = engine.load_weights
    monkeypatch.setattr(engine, "load_weights", lambda stream, version: load(swapped(stream), version))
    message = r"version 6: model.layers.0.mlp.down_proj.weight in the engine is not what the actor sent \(2 of"
    with pytest.raises(RunFailed, match=message):
        weight_sync.send(hf_stream(models[1]), engine, version=6, verify=True)


def test_a_loader_that_leaves_out_a_shard_is_found(engine, models, monkeypatch):
    """By the checks of every sync, which look at what vLLM's loading makes of a correct stream."""
    network = engine._model()
    load = network.load_weights
    monkeypatch.setattr(network, "load_weights", lambda stream: load((n, t) for n, t in list(stream) if n != QUERY))
    with pytest.raises(RunFailed, match="self_attn.qkv_proj.weight was not wholly written"):
        engine.load_weights(hf_stream(models[1]), version=7)


@pytest.mark.parametrize("keep", [True, False])
def test_new_weights_in_the_middle_of_a_response(models, keep):
    """Responses continue with the old weights' keys and values, or with recomputed ones."""
    from megatron_rft.inference.vllm.engine import VLLMEngine

    prompt, before, count = (5, 6, 7), 5, 12
    with closing(VLLMEngine(CONFIG, max_batch_sequences=4, keep_caches=keep)) as engine:
        engine.load_weights(hf_stream(models[0]), version=0)
        steps = iter(range(100))
        engine.on_step = lambda: next(steps) == before and engine.load_weights(hf_stream(models[1]), version=1)
        (response,) = answers(engine, [Request(0, prompt, 1, seed=1)], Sampling(count))[0]
        again = answers(engine, [Request(0, prompt, 1, seed=1)], Sampling(count))[0][0]
    assert (response.weight_version, again.weight_version) == (0, 1)
    ids = torch.tensor([[*prompt, *response.token_ids]])
    old = len(prompt) + before - 1  # the last token of the old weights has been through neither
    cache = models[0](ids[:, :old], use_cache=True).past_key_values if keep else None
    logits = models[1](ids[:, old if keep else 0 : -1], past_key_values=cache).logits[0]
    expected = logits.log_softmax(-1).gather(1, ids[0, -len(logits) :, None])[-(count - before) :, 0]
    torch.testing.assert_close(torch.tensor(response.logprobs[before:]), expected, rtol=1e-4, atol=1e-4)
    fresh = torch.tensor([[*prompt, *again.token_ids]])
    expected = models[1](fresh[:, :-1]).logits[0].log_softmax(-1).gather(1, fresh[0, 1:, None])[len(prompt) - 1 :, 0]
    torch.testing.assert_close(torch.tensor(again.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_a_stale_version_ends_the_run(engine):
    engine.llm.set_weight_version("2")
    with pytest.raises(RunFailed, match="wrote a response with weights of version 2, and those of version 3 were load"):
        list(engine.generate(some_requests(1), Sampling(3)))


def test_arguments_that_vllm_refuses():
    from megatron_rft.inference.vllm.engine import VLLMEngine

    with pytest.raises(ConfigError, match="vLLM does not start with these arguments"):
        VLLMEngine(CONFIG, options={"max_num_batched_tokens": 16})


def test_an_engine_beside_the_trainer_takes_its_share_or_names_the_option(monkeypatch):
    """On a GPU of 80 GiB, of which the trainer leaves 60 or 40. Nothing is started."""
    from megatron_rft.inference.vllm.engine import VLLMEngine

    engine, gib = object.__new__(VLLMEngine), 1 << 30
    engine.config, engine.device, engine.dtype, engine.ranks = CONFIG, torch.device("cuda"), torch.bfloat16, 1
    engine.max_model_len, engine.counting, engine.reserve = 1024, False, 5 * gib
    free = [20 * gib, 60 * gib]  # what torch's allocator has given back is free, too
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.reverse() if free[0] < free[1] else None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free[0], 80 * gib))
    weights = 2 * sum(parameter.numel() for parameter in build_model(CONFIG, 0).parameters())
    assert engine._share({}, 0.5) == {"gpu_memory_utilization": 0.5, "kv_cache_memory_bytes": 38 * gib - weights}
    given = engine._share({"gpu_memory_utilization": 0.6}, 0.5)  # the recipe's comes first
    assert given["kv_cache_memory_bytes"] == 46 * gib - weights
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (40 * gib, 80 * gib))
    with pytest.raises(
        ConfigError, match="0.5 of 80.0 GiB is more than is free .* 40.0 GiB, less rollout.reserve_gib 5"
    ):
        engine._share({}, 0.5)


# --- speculative decoding


@pytest.fixture(scope="module")
def drafting(models):
    from megatron_rft.inference.vllm.engine import VLLMEngine

    engine = VLLMEngine(CONFIG, max_batch_sequences=32, options={"speculative_config": COPIES})
    engine.load_weights(hf_stream(models[0]), version=3)
    yield engine
    engine.close()


def test_copies_from_the_prompt_do_not_change_the_tokens(engine, drafting):
    """The speculation of the refiner's engine."""
    greedy = Sampling(30, temperature=0, stop_token_ids=(STOP,))
    requests = some_requests(10, n=1)
    expected = tokens(answers(engine, requests, greedy))
    # Each prompt now holds the response, as a refiner's does.
    requests = [Request(r.id, (*r.prompt_ids, *expected[r.id][0], *r.prompt_ids), 1, r.seed) for r in requests]
    before, found, plain = drafting.statistics(), answers(drafting, requests, greedy), answers(engine, requests, greedy)
    assert tokens(found) == tokens(plain)
    for id, (response,) in found.items():
        difference = torch.tensor(response.logprobs) - torch.tensor(plain[id][0].logprobs)
        assert difference.abs().max() < 1e-5
    counted = drafting.statistics()
    assert before == {} and counted["speculation/proposed"] > counted["speculation/accepted"] > 20
    assert 1 < counted["speculation/tokens_per_step"] <= 17
    assert drafting.statistics() == {}, "since the last time"


def test_a_draft_model_has_weights_of_its_own(shared, models, tmp_path):
    """They are the model's here, so all of its drafts are accepted until the model gets other weights."""
    from megatron_rft.inference.vllm.engine import VLLMEngine

    models[0].save_pretrained(tmp_path)
    speculation = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    requests, greedy, accepted = some_requests(10, n=1), Sampling(30, temperature=0), []
    with closing(VLLMEngine(CONFIG, max_batch_sequences=32, options={"speculative_config": speculation})) as engine:
        for version, model in enumerate(models):
            for each in (engine, shared):
                weight_sync.send(hf_stream(model), each, version, verify=True)
            assert tokens(answers(engine, requests, greedy)) == tokens(answers(shared, requests, greedy))
            counted = engine.statistics()
            accepted.append(counted["speculation/accepted"] / counted["speculation/proposed"])
    assert accepted[0] > 0.9 and accepted[1] < 0.5


def test_two_engines_of_one_process_alternate(engine, drafting):
    """Two threads use them: vLLM's forward pass has global state."""
    requests, sampling = some_requests(20), Sampling(20, temperature=0, stop_token_ids=(STOP,))
    expected = tokens(answers(engine, requests, sampling))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: tokens(answers(each, requests, sampling)), [engine, drafting]))
    assert found == [expected, expected]


def test_sampled_speculation_keeps_the_distribution(models):
    """n-gram drafts at temperature 0.8: log-probs are those of the forward pass, and -log p - H is 0 in the mean."""
    from megatron_rft.inference.vllm.engine import VLLMEngine

    speculation = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
    engine = VLLMEngine(CONFIG, max_batch_sequences=64, options={"speculative_config": speculation})
    with closing(engine):
        engine.load_weights(hf_stream(models[0]), version=3)
        requests = [Request(i, (5, 6, 7 + i % 3, 8) * 4, 8, seed=i) for i in range(24)]
        found = answers(engine, requests, Sampling(40, temperature=0.8))
        counted = engine.statistics()
        assert counted["speculation/proposed"] > 200 and counted["speculation/accepted"] > 5
    surprise = []
    for request in requests:
        for response in found[request.id]:
            logprobs = replay(models[0], request.prompt_ids, response.token_ids, temperature=0.8)
            chosen = logprobs.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(response.logprobs), chosen, atol=1e-4, rtol=0)
            surprise.append(-chosen + (logprobs.exp() * logprobs).sum(-1))
    surprise = torch.cat(surprise)
    assert abs(surprise.mean()) < 4 * surprise.std() / len(surprise) ** 0.5


def test_requests_join_others_between_two_steps(engine, monkeypatch):
    """They get the same tokens as together."""
    sampling = Sampling(12, temperature=0.0)
    first, *later = some_requests(4, n=1)
    expected, waiting = tokens(answers(engine, [first, *later], sampling)), list(later)
    monkeypatch.setattr(engine, "on_step", lambda: engine.add([waiting.pop()]) if waiting else None)
    found = {group.id: group.responses for group in engine.generate([first], sampling)}
    assert tokens(found) == expected and not waiting


def test_the_prefix_cache_lives_from_turn_to_turn_until_a_sync(engine, models, monkeypatch):
    """Second turns are bit by bit those of an empty cache, and new weights empty it."""
    rng, cached, step = random.Random(7), [], engine._step
    prompts = [tuple(rng.randrange(3, 100) for _ in range(150)) for _ in range(4)]  # longer than a block of the cache

    def counting():
        outputs = step()
        cached.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    def turns(requests: list[Request], continues: bool) -> tuple[dict, int]:
        cached.clear()
        return answers(engine, requests, Sampling(20, continues=continues)), sum(cached)

    monkeypatch.setattr(engine, "_step", counting)
    first, _ = turns([Request(i, prompt, 1, seed=i) for i, prompt in enumerate(prompts)], False)
    second = [Request(i, prompts[i] + first[i][0].token_ids, 1, seed=9 + i) for i in first]
    kept, reused = turns(second, True)
    assert reused >= 4 * 128
    assert turns(second, False) == (kept, 0)
    engine.load_weights(hf_stream(models[1]), version=4)
    synced, reused = turns(second, True)
    assert reused == 0 and tokens(synced) != tokens(kept)
    assert turns(second, False) == (synced, 0)


@pytest.mark.slow
def test_minimax_m2_takes_weights_and_sigmoid_scores_are_not_for_a_cpu():
    """Its norms of queries and keys have a loader without a name, at which vLLM's reloading ends. vLLM's router for the
    CPU computes softmax scores alone."""
    from megatron_rft.inference.vllm.engine import VLLMEngine

    rope = dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)
    published = dict(rotary_dim=16, scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True)
    mixture = dict(head_dim=32, num_local_experts=4, num_experts_per_tok=2, rope_parameters=rope)
    special = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)
    config = MiniMaxM2Config(**sizes(2, 128, 4, 2, 96, vocab_size=130), **mixture, **published, **special)
    with closing(VLLMEngine(config, max_batch_sequences=4)) as engine:
        engine.load_weights(hf_stream(model := build_model(config)), version=1)
        sent = {name: checksum(tensor) for name, tensor in hf_stream(model)}
        assert engine.checksums() == sent
        with pytest.raises(AssertionError):
            list(engine.generate([Request(0, (5, 6), 1, seed=1)], Sampling(2)))
