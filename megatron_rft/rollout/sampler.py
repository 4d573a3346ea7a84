"""Turns prompts into a scored batch: every rank generates for some of them, and all ranks get the same batch.

The ranks' lists are joined through the argument `gather`. The batch does not depend on the number of ranks: seeds are
functions of the problem and the step, and sequences are in the order of the prompts and their samples.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rft.inference.engine import Engine, Generate, Group, Request, Sampling, request_seed
from megatron_rft.records import Batch, Prompt, Response, Score, concatenate, flat
from megatron_rft.rewards.base import Reward, check_finite, check_share, scored
from megatron_rft.rollout import refiner as refinement
from megatron_rft.rollout.refiner import Refined, Refiner, Refining
from megatron_rft.rollout.routes import RouteStore


@dataclass(frozen=True)
class ScoredResponse:
    """One scored response. `prompt_index`: the index of the prompt in the step."""

    prompt_index: int
    sample: int
    prompt: Prompt
    response: Response
    text: str
    score: Score
    context: tuple[int, ...] | None = None  # a second prompt for the same response, for objectives that use one
    refined: Refined | None = None
    unrefined: str = ""  # why a refiner did not refine it

    @property
    def key(self) -> tuple[int, int]:
        return self.prompt_index, self.sample


@dataclass(frozen=True)
class RoundResult:
    """The result of one round of sampling, of one rank or of all ranks."""

    rollouts: list[ScoredResponse]
    generation_seconds: float
    reward_seconds: float  # includes grading during generation
    refiner_seconds: float = 0.0  # includes refinement during generation

    @cached_property
    def batch(self) -> Batch:
        """All rollouts that have a reward. Made once: each of the millions of tokens is a Python object here."""
        return to_batch(self.rollouts)


@dataclass(frozen=True)
class Sampled:
    """A sampled step. `batch`: the groups to train on; `rollouts` and `metrics`: of everything that was sampled."""

    batch: Batch
    metrics: dict[str, float]
    rollouts: list[ScoredResponse]


Keep = Callable[[Batch], Tensor]
"""Returns [B] bool: the sequences to train on."""


@dataclass(frozen=True)
class PendingRound:
    """A round of sampling that has started. Each of `parts` waits for results of this rank; the second (collective)
    generates the unfinished requests of lost engines."""

    step: int
    prompts: dict[int, Prompt]  # by index in the step
    parts: list[Callable[[], RoundResult]]


@dataclass
class Sampler:
    """
    Args:
        keep: chooses the sequences to train on. In at most `max_rounds` rounds a step samples until it has accepted
            enough groups (DAPO's dynamic sampling).
        gather: concatenates all ranks' lists, in rank order, on every rank.
        gather_on_main: the same on rank 0 alone; elsewhere it returns the rank's own list.
        driver: `Engine.driver` of this rank.
        contexts: adds contexts to the responses of a group.
        background: `begin` samples and grades in another thread. This needs an engine outside of the process
            (`EnginePool`).
        routes: keeps the experts of this rank's responses, which `sampling` then asks for.
    """

    engine: Engine
    sampling: Sampling
    reward: Reward
    tokenizer: Any
    group_size: int
    seed: int
    keep: Keep | None = None
    max_rounds: int = 1
    gather: Callable[[list], list] = list
    gather_on_main: Callable[[list], list] = list
    driver: tuple[int | None, int] = (0, 1)
    contexts: Callable[[list[ScoredResponse]], list[ScoredResponse]] | None = None
    refiner: Refiner | None = None
    phases: Callable[[str], AbstractContextManager] = nullcontext
    background: bool = False
    routes: RouteStore | None = None

    def __post_init__(self):
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampling") if self.background else None

    def begin(self, prompts: list[Prompt], step: int, number: int = 0, first: int = 0) -> PendingRound:
        """Start round `number` of a step; prompt indices start at `first`. Without `background` it runs when it is
        collected."""
        requests = self._requests(prompts, first, step, number)
        numbered, grade = dict(enumerate(prompts, first)), partial(self._graded, step)
        if self._thread is None:
            return PendingRound(step, numbered, [partial(grade, requests, self.engine.generate)])
        left: list[Request] = []  # unfinished requests of lost engines
        job = self._thread.submit(grade, requests, partial(self.engine.begin, left=left))
        return PendingRound(step, numbered, [job.result, partial(grade, left, self.engine.retry)])

    def collect(self, pending: PendingRound, draw: Callable[[int], list[Prompt]], count: int) -> list[RoundResult]:
        """Wait for a round, and sample more until `keep` has accepted `count` groups. `draw(n)` returns the next n
        prompts, the same on every rank. Collective."""
        rounds = [self._round(pending)]
        drawn = count
        while (missing := count - groups_in(self._kept(rounds))) > 0 and len(rounds) < self.max_rounds:
            rounds.append(self._round(self.begin(draw(missing), pending.step, len(rounds), drawn)))
            drawn += missing
        return rounds

    def conclude(self, rounds: list[RoundResult], step: int) -> Sampled:
        """Build the batch of a step from its rounds of sampling: the groups that `keep` accepts; if there are none, the
        whole last round, whose rewards give no gradient.

        Its scalars are sampled_reward_sum and sampled_count over all rounds, the step, and the oldest weight version
        that any response started with.
        """
        rollouts = [rollout for each in rounds for rollout in each.rollouts]
        check_share(ungraded(rollouts), len(rollouts), self.reward, f"step {step}")
        kept = self._kept(rounds)
        groups = groups_in(kept)
        rewards = [rollout.score.reward for rollout in rollouts if rollout.score.error is None]
        oldest = min(rollout.response.weight_version for rollout in rollouts if len(rollout.response.token_ids))
        scalars = {"sampled_reward_sum": math.fsum(rewards), "sampled_count": float(len(rewards))}
        scalars |= {"step": float(step), "oldest_version": float(oldest)}
        result = (concatenate(kept) if groups else rounds[-1].batch).with_scalars(**scalars)
        graded = concatenate([each.batch for each in rounds])
        metrics, seconds = statistics(rollouts, graded), sum(each.generation_seconds for each in rounds)
        if self.refiner:
            metrics |= refinement.statistics(rollouts)
            metrics["rollout/refiner_seconds"] = sum(each.refiner_seconds for each in rounds)
        metrics |= {
            "rollout/generation_seconds": seconds,
            "rollout/reward_seconds": sum(each.reward_seconds for each in rounds),
            "rollout/tokens_per_second": metrics["tokens/generated"] / seconds,
            "rollout/rounds": len(rounds),
            "rollout/kept_groups": groups,
            "rollout/staleness": step - 1 - oldest,
        }
        return Sampled(result, {name: float(value) for name, value in metrics.items()}, rollouts)

    def _kept(self, rounds: list[RoundResult]) -> list[Batch]:
        """Return for each round the batch of responses that `keep` accepts."""
        batches = [each.batch for each in rounds]
        return batches if self.keep is None else [batch.select(self.keep(batch)) for batch in batches]

    def close(self) -> None:
        """Shut the thread down. A round that has started continues until the engine is closed."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _round(self, pending: PendingRound) -> RoundResult:
        """Wait for a round. Returns all ranks' rollouts in order, and the seconds of the slowest rank."""
        step, parts = pending.step, [part() for part in pending.parts]
        if self.routes:
            parts = [replace(part, rollouts=self.routes.take(part.rollouts, step)) for part in parts]
        results = self.gather([replace(part, rollouts=list(map(packed, part.rollouts))) for part in parts])
        rollouts = [replace(r, prompt=pending.prompts[r.prompt_index]) for result in results for r in result.rollouts]
        words = dict(self.gather_on_main([words_of(r) for part in parts for r in part.rollouts]))
        rollouts = [with_words(r, words) for r in rollouts]
        rollouts.sort(key=lambda rollout: rollout.key)
        when = f"step {step}"
        for each in rollouts:
            check_finite(each.score, when, each.prompt, each.sample, each.text)
        failed = ungraded(rollouts)  # the same on all ranks, so all of them stop
        if not self.reward.max_error_share or len(failed) == len(rollouts):
            check_share(failed, len(rollouts), self.reward, when)
        clocks = ("generation_seconds", "reward_seconds", "refiner_seconds")
        seconds = (max(getattr(result, name) for result in results) for name in clocks)
        return RoundResult(rollouts, *seconds)

    def _graded(self, step: int, requests: list[Request], generate: Generate) -> RoundResult:
        """Generate, score and refine this rank's requests. One thread begins to grade groups while later ones are
        generated; another waits for the scores, since some graders work elsewhere; a third refines scored groups."""
        start, prompts = time.perf_counter(), {request.id: request.problem for request in requests}
        with ThreadPoolExecutor(1, "reward") as scoring, ThreadPoolExecutor(1, "scores") as waiting:
            refining = Refining(self.refiner, self.reward, scoring, step) if self.refiner else None
            jobs = []
            for group in generate(requests, self.sampling):
                begun = scoring.submit(self._begin, prompts[group.id], group)
                jobs.append(waiting.submit(self._score, begun, prompts[group.id], group, refining))
            seconds = time.perf_counter() - start
            with self.phases("reward"):  # the grading that remains when generation has ended
                scored = [job.result() for job in jobs]
            rollouts = [rollout for some, _ in scored for rollout in some]
            if refining:
                with self.phases("refine"):
                    rollouts = refining.finish(rollouts)
        reward_seconds = sum(seconds for _, seconds in scored)
        return RoundResult(rollouts, seconds, reward_seconds, refining.seconds if refining else 0.0)

    def _requests(self, prompts: list[Prompt], first: int, step: int, number: int) -> list[Request]:
        """Return this rank's requests. Prompts are distributed by length, so that ranks have about equal work. A
        problem that was drawn twice is sampled with two seeds."""
        seen, requests = Counter[int](), []
        for index, prompt in enumerate(prompts, first):
            seed = request_seed(self.seed, step, number, prompt.index, seen[prompt.index])
            seen[prompt.index] += 1
            requests.append(Request(index, tuple(prompt.token_ids), self.group_size, seed, problem=prompt))
        rank, world = self.driver
        return [] if rank is None else sorted(requests, key=lambda request: len(request.prompt_ids))[rank::world]

    def _begin(self, prompt: Prompt, group: Group) -> tuple[list[Response], list[str], Callable[[], list[Score]]]:
        """Start to grade a group. Returns its responses and their texts, and a function that waits for the scores."""
        given = [each.joined() for each in group.responses]
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        answers = [decode(list(response.last_turn)) for response in given]
        pairs = zip(given, answers, strict=True)
        texts = [decode(list(each.token_ids)) if len(each.turns) > 1 else answer for each, answer in pairs]
        return given, texts, scored(self.reward, [prompt] * len(given), answers, given)

    def _score(
        self, begun: Future, prompt: Prompt, group: Group, refining: Refining | None
    ) -> tuple[list[ScoredResponse], float]:
        start = time.perf_counter()
        given, texts, wait = begun.result()
        rollouts = [
            ScoredResponse(group.id, sample, prompt, replace(each, score=None) if each.score else each, text, score)
            for sample, (each, text, score) in enumerate(zip(given, texts, wait(), strict=True))
        ]
        if self.contexts:
            rollouts = self.contexts(rollouts)
        if refining:
            wanted = None if self.refiner.options.agreeing else self.keep
            rollouts = refining.add(rollouts, worth_training(rollouts, wanted))
        return rollouts, time.perf_counter() - start


def packed(rollout: ScoredResponse) -> ScoredResponse:
    """A response for the other ranks: without its prompt, which they have, without words, which only rank 0 needs, and
    with arrays instead of tuples. As Python objects tokens and log-probs would take twice the bytes and ten times the
    time, on every rank."""
    response, score = rollout.response, rollout.score
    token_ids, logprobs = np.asarray(response.token_ids, np.int32), np.asarray(response.logprobs, np.float32)
    context = None if rollout.context is None else np.array(rollout.context, dtype=np.int32)
    segment_of = np.asarray(response.segment_of, np.int32) if len(response.segment_of) else ()
    response = replace(response, token_ids=token_ids, logprobs=logprobs, segment_of=segment_of)
    score = replace(score, reason="", details={}) if score.reason or score.details else score
    text = "" if score.usable else rollout.text  # a message on every rank names it
    return replace(rollout, prompt=None, text=text, response=response, score=score, context=context)


def words_of(rollout: ScoredResponse) -> tuple[tuple[int, int], tuple]:
    """(index of the prompt, sample) -> text, and the score's reason and details."""
    return rollout.key, (rollout.text, rollout.score.reason, rollout.score.details)


def with_words(rollout: ScoredResponse, words: dict[tuple[int, int], tuple]) -> ScoredResponse:
    """The response with its words where they are there."""
    if rollout.key not in words:
        return rollout
    text, reason, details = words[rollout.key]
    return replace(rollout, text=text, score=replace(rollout.score, reason=reason, details=details))


def worth_training(group: list[ScoredResponse], keep: Keep | None) -> list[bool]:
    """Return for each response of a group whether the algorithm will train on it."""
    usable = [each.score.usable for each in group]
    if keep is None or not any(usable):
        return usable
    kept = iter(keep(to_batch([each for each, fine in zip(group, usable, strict=True) if fine])).tolist())
    return [fine and next(kept) for fine in usable]


def ungraded(rollouts: list[ScoredResponse]) -> list[tuple[Prompt, str]]:
    """The problem and the error of each response without a score."""
    return [(each.prompt, each.score.error) for each in rollouts if each.score.error is not None]


def groups_in(batches: list[Batch]) -> int:
    return sum(len(batch.sequences["group"].unique()) for batch in batches)


def to_batch(rollouts: list[ScoredResponse]) -> Batch:
    """Build a batch of the rollouts that have a reward, in their order. A group's number is its prompt index."""
    rollouts = [rollout for rollout in rollouts if rollout.score.error is None]
    responses = [rollout.response for rollout in rollouts]
    logprobs = flat([response.logprobs for response in responses], torch.float32)
    prompts = {rollout.prompt_index: np.asarray(rollout.prompt.token_ids) for rollout in rollouts}
    batch = Batch.of(
        [rollout.response.prompt_ids or prompts[rollout.prompt_index] for rollout in rollouts],
        [response.token_ids for response in responses],
        tokens={"rollout_logprobs": logprobs} | masks(responses),
        sequences={
            "group": torch.tensor([rollout.prompt_index for rollout in rollouts]),
            "rewards": torch.tensor([rollout.score.reward for rollout in rollouts], dtype=torch.float32),
            "shaping": torch.tensor([rollout.score.shaping for rollout in rollouts], dtype=torch.float32),
            "prompt_index": torch.tensor([rollout.prompt.index for rollout in rollouts]),
            "finished": torch.tensor([int(response.finish_reason == "stop") for response in responses]),
            "weight_version": torch.tensor([response.weight_version for response in responses]),
        },
    )
    if any(rollout.prompt.images is not None for rollout in rollouts):
        keys = [r.prompt.images_key if r.response.images is None else r.response.images for r in rollouts]
        batch = batch.with_sequences(images=torch.tensor(keys))
    if responses and all(isinstance(response.routes, int) for response in responses):
        batch = batch.with_sequences(route=torch.tensor([response.routes for response in responses]))
    if any(len(response.segment_of) for response in responses):
        batch = batch.with_segments([response.segment_of for response in responses])
    if any(response.supports for response in responses):
        batch = batch.with_supports([response.supports for response in responses])
    contexts = [rollout.context for rollout in rollouts]
    batch = batch if any(context is None for context in contexts) else batch.with_contexts(contexts)
    if not all(rollout.refined or rollout.unrefined for rollout in rollouts):
        return batch
    refined = [list(each.refined.token_ids) if each.refined and each.refined.kept else [] for each in rollouts]
    return batch.with_refined(refined)


def masks(responses: list[Response]) -> dict[str, Tensor]:
    """[R] response_mask and, of episodes, turn_rewards."""
    ends = torch.tensor([len(response.token_ids) for response in responses]).cumsum(0).tolist()
    if not any(response.turns for response in responses):
        return {"response_mask": torch.ones(ends[-1] if ends else 0)}
    mask, rewards = torch.zeros(ends[-1]), torch.zeros(ends[-1])
    for response, end in zip(responses, ends, strict=True):
        start = end - len(response.token_ids)
        for first, last, reward in response.turns or [(0, len(response.token_ids), 0.0)]:
            mask[start + first : start + last] = 1.0
            rewards[start + last - 1] = reward
    return {"response_mask": mask, "turn_rewards": rewards}


def statistics(rollouts: list[ScoredResponse], batch: Batch) -> dict[str, float]:
    """Return the metrics of the rollouts; `batch` has those with a reward. A response is right if the verifier says so,
    or else if its reward is at least 1, and wrong if its reward is at most 0. Lengths and counts include responses
    without a reward."""
    rewards, groups = batch.sequences["rewards"], batch.sequences["group"]
    by_group = [rewards[groups == each] for each in groups.unique()]
    right = torch.tensor([rollout.score.right for rollout in rollouts if rollout.score.error is None])
    lengths = torch.tensor([rollout.response.length for rollout in rollouts], dtype=torch.float32)
    finished = [rollout.response.finish_reason == "stop" for rollout in rollouts]
    played = [rollout.response for rollout in rollouts if rollout.response.turns]
    spreads = [each.std(correction=0).item() for each in by_group if len(each) > 1]
    kept = None if batch.support_lens is None else batch.support_lens[batch.response_mask > 0].float()
    return {
        "reward/mean": rewards.mean().item(),
        **({"reward/group_std": sum(spreads) / len(spreads)} if spreads else {}),
        "reward/std": rewards.std(correction=0).item(),
        "reward/all_right_groups": sum(bool(right[groups == each].all()) for each in groups.unique()) / len(by_group),
        "reward/all_wrong_groups": sum(bool((each <= 0).all()) for each in by_group) / len(by_group),
        "reward/grader_errors": len(rollouts) - len(batch),
        "response/length_mean": lengths.mean().item(),
        "response/length_max": lengths.max().item(),
        "response/finished": sum(finished) / len(finished),
        "tokens/generated": lengths.sum().item(),
        **({} if kept is None else {"rollout/support": kept.mean().item()}),
        **(of_episodes(played, rollouts) if played else {}),
    }


def of_episodes(played: list[Response], rollouts: list[ScoredResponse]) -> dict[str, float]:
    """Return the metrics of the episodes `played`; one that failed before its first turn is in `rollouts` alone."""
    turns = [len(response.turns) for response in played]
    segments = [response.segment_count for response in played]
    return {
        **({"environment/segments_mean": sum(segments) / len(segments)} if max(segments) > 1 else {}),
        "environment/errors": sum(rollout.response.finish_reason == "abort" for rollout in rollouts),
        "environment/turns_mean": sum(turns) / len(turns),
        "environment/turns_max": max(turns),
        "environment/reward_mean": sum(reward for each in played for *_, reward in each.turns) / len(played),
        "environment/tokens_share": 1 - sum(each.length for each in played) / sum(len(e.token_ids) for e in played),
    }
