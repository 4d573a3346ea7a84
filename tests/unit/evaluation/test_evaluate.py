"""Evaluation with a scripted engine: distribution over ranks, grading and statistics."""

import hashlib
import json
import math
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from examples.quickstart import arithmetic
from megatron_rft.evaluation.evaluate import EvaluationCache, GradedSampler, evaluate, table, write
from megatron_rft.inference.engine import Group, Sampling, request_seed
from megatron_rft.records import Prompt, Response, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.rewards.math import MathReward
from megatron_rft.utils.errors import ConfigError, RunFailed

TOKENIZER = arithmetic.tokenizer()
PROMPTS = [
    Prompt(10 + i, tuple(TOKENIZER(f"{i}+1")["input_ids"]), f"{i}+1", str(i + 1), {"level": i % 2, "subject": "sums"})
    for i in range(7)
]


class ScriptedEngine:
    """Adds one, right about half of the time by its request's seed; groups end in reverse order."""

    weight_version = 0
    dies_at = None  # the request that ends the process

    def generate(self, requests, sampling):
        for request in reversed(requests):
            if request.id == self.dies_at:
                raise KeyboardInterrupt
            value = int(TOKENIZER.decode(request.prompt_ids)[0]) + 1
            luck = random.Random(request.seed)
            texts = [f"so\n#### {value + luck.randint(0, 1)}" for _ in range(request.n)]
            ids = [(*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id) for text in texts]
            yield Group(request.id, tuple(Response(each, (0.0,) * len(each), "stop", 0) for each in ids))


def sampler(reward, engine=None, samples=4) -> GradedSampler:
    return GradedSampler(engine or ScriptedEngine(), Sampling(8), TOKENIZER, reward, samples, seed=1)


def run(**options):
    return evaluate(sampler(MathReward()), PROMPTS, **options)


def test_the_result_does_not_depend_on_ranks_or_batches():
    barrier, shared = threading.Barrier(3), {}

    def on_rank(rank):
        def gather(mine):
            shared[rank] = mine
            barrier.wait(timeout=300)
            found = [each for other in range(3) for each in shared[other]]
            barrier.wait(timeout=300)  # no rank writes its next value before all have read
            return found

        return run(rank=rank, world=3, gather=gather, batch=2)

    with ThreadPoolExecutor(3) as ranks:
        results = list(ranks.map(on_rank, range(3)))
    assert results == [run()] * 3


def test_a_reward_that_is_no_number_ends_the_run():
    """Planted on the second response to each problem."""

    class Broken(MathReward):
        def __call__(self, prompts, texts):
            scores = super().__call__(prompts, texts)
            return [Score(math.nan) if i % 4 == 1 else score for i, score in enumerate(scores)]

    with pytest.raises(RunFailed, match=r"test: the reward is nan on response 1 to problem \d+ .*must be finite"):
        evaluate(sampler(Broken()), PROMPTS)


def test_numbers_and_files(tmp_path):
    result = run(name="toy")
    right = [each.reward for each in result.completions]
    assert result.pass_at_1 == pytest.approx(sum(right) / 28) and 0 < result.pass_at_1 < 1
    assert result.problems == 7 and result.samples == 4 and result.errors == 0 and result.truncated == 0.0
    assert result.pass_at_k[1] == pytest.approx(result.pass_at_1) and result.pass_at_k[4] >= result.pass_at_k[2]
    assert result.mean_tokens == 5.0  # "s" "o" "\n#### " number eos

    write([result], tmp_path)
    [saved] = json.loads((tmp_path / "results.json").read_text())
    cache = [json.loads(line) for line in (tmp_path / "toy.jsonl").read_text().splitlines()]
    assert saved["pass_at_1"] == result.pass_at_1 and "completions" not in saved
    assert len(cache) == 28 and cache[0]["problem"] == 10 and cache[0]["text"].startswith("so\n#### ")
    assert saved["majority"] == result.majority and cache[0]["level"] == "0"
    assert (tmp_path / "results.md").read_text() == table([result]) + "\n"
    assert table([result]).splitlines()[2].startswith(f"| toy | 7 | 4 | {result.pass_at_1:.3f} ± ")


def test_a_killed_evaluation_goes_on_where_it_was(tmp_path):
    def go(dies_at=None, **depends_on):
        engine = ScriptedEngine()
        engine.dies_at = dies_at
        cache = EvaluationCache(tmp_path, "toy", {"weights": [("a", 1)]} | depends_on, 4)
        found = len(cache.completions)
        return found, evaluate(sampler(MathReward(), engine), PROMPTS, batch=2, cache=cache)

    with pytest.raises(KeyboardInterrupt):
        go(dies_at=14)  # in the third of four batches
    path = tmp_path / "toy.jsonl"
    path.write_text(path.read_text() + '{"problem": 14, "sam')  # a line that was torn
    found, result = go()
    assert found == 4 and result == run()
    assert go()[0] == 7
    for line in (4, 1):  # a problem that lacks a sample is asked again; so is all after the first torn line
        path.write_text("\n".join(path.read_text().splitlines()[: 4 * 2 + line]))
        assert go()[0] == (3 if line == 4 else 2)
    assert go(seed=2)[0] == 0 and go(seed=2)[0] == 7  # other conditions: nothing is taken over


def test_failed_gradings_are_counted_apart():
    class Failing(MathReward):
        def __call__(self, prompts, texts):
            scores = super().__call__(prompts, texts)
            return [Score(0.0, error="broken"), *scores[1:]]

    result = evaluate(sampler(Failing()), PROMPTS)
    assert result.errors == 1 and [each.error for each in result.completions].count("broken") == 1


def test_an_evaluation_without_any_verdict_says_what_to_correct():
    class Broken(MathReward):
        def __call__(self, prompts, texts):
            return [Score(0.0, error="no sandbox")] * len(texts)

    told = "^toy: 28 of 28 answers could not be judged; .* Problem 10: no sandbox. Correct the benchmark's reward, else"
    with pytest.raises(RunFailed, match=f"{told} reward or environment.score, and run the same command again$"):
        evaluate(sampler(Broken()), PROMPTS, name="toy")


def test_request_seeds_are_stable():
    # written down, so that a change of it is a choice
    digest = hashlib.blake2b(b"1/test/10", digest_size=8).digest()
    assert request_seed(1, "test", 10) == int.from_bytes(digest, "little") // 2
    assert len({request_seed(s, p, i) for s in (0, 1) for p in ("test", "train") for i in range(50)}) == 200


class Tiers(Reward):
    """Partial rewards, with a separate verdict whether the answer is correct."""

    def __call__(self, prompts, texts):
        return [Score(4.0, correct=True) if prompt.index % 2 else Score(-0.3, correct=False) for prompt in prompts]

    def answer(self, prompt, text):
        return None


def test_accuracy_is_what_the_verifier_counts_and_not_its_partial_reward():
    result = evaluate(sampler(Tiers(), samples=1), PROMPTS)
    assert result.pass_at_1 == pytest.approx(3 / 7)
    assert {(each.reward, each.correct) for each in result.completions} == {(4.0, 1.0), (-0.3, 0.0)}


def test_line_separators_in_a_completion_are_no_ends_of_lines(tmp_path):
    row = {"problem": 0, "text": "one\u2028two\u0085three\nfour"}
    EvaluationCache(tmp_path, "toy", {}, 1).add([row])
    assert EvaluationCache(tmp_path, "toy", {}, 1).completions == {0: [row]}


def test_a_file_that_no_evaluation_has_written_stays(tmp_path):
    (tmp_path / "data.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"out: .*data.jsonl is there, and no evaluation has written it"):
        EvaluationCache(tmp_path, "data", {}, 1)
    assert (tmp_path / "data.jsonl").read_text() == "{}\n", "the benchmark's own rows are there still"
    (tmp_path / "toy.jsonl").touch()  # a kill may leave it before its conditions
    assert EvaluationCache(tmp_path, "toy", {}, 1).completions == {}


def test_problems_whose_grader_failed_are_asked_again(tmp_path):
    EvaluationCache(tmp_path, "toy", {}, 1).add([{"problem": 0, "error": "no sandbox"}, {"problem": 1, "error": None}])
    assert list(EvaluationCache(tmp_path, "toy", {}, 1).completions) == [1]
