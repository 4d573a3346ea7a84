"""Lets a frozen model, the refiner, correct the policy's responses (dynamic constraint paper, section 3.2).

The refiner reads the problem, a response and, if its template shows it, the reward, and writes a refined response. The
text is cleaned once; the reward grades the cleaned text, and training uses its tokens. A text equal to the response
keeps the response's tokens, a text that cleaning did not change keeps the engine's tokens, and any other is tokenised.

Not refined are responses that already have the largest reward, since the filter would drop the pair; responses whose
grader failed; responses that the algorithm leaves out of training; and responses whose refiner prompt is too long.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron_rft.config.constraint import DynamicOptions
from megatron_rft.inference.engine import Engine, Request, Sampling
from megatron_rft.records import Prompt, Response, Score
from megatron_rft.rewards.base import Reward
from megatron_rft.utils.plain_text import plain_text

CHAT_MARKER = re.compile(r"<\|(?:im_start|start_header_id)\|>\s*(?:assistant)?\s*(?:<\|end_header_id\|>)?|<\|\w+\|>")
ONE_BLOCK = re.compile(r"\s*```[\w+-]*[ \t]*\n(.*?)\n?```\s*", re.DOTALL)
AT_MAXIMUM, GRADER_FAILED, NOT_TRAINED, NOT_CHOSEN, TOO_LONG = "maximum", "grader", "untrained", "unchosen", "length"


def clean(text: str, response: str) -> str:
    """Remove chat markers from a refined text, and a code fence around all of it. If the response has a fence too, the
    fence stays. A text that was changed also loses white space at both ends."""
    cleaned = CHAT_MARKER.sub("", text)
    block = ONE_BLOCK.fullmatch(cleaned)
    if block and "```" not in response and "```" not in block[1]:
        cleaned = block[1]
    return text if cleaned == text else cleaned.strip()


@dataclass(frozen=True)
class Refined:
    """A refined response."""

    token_ids: tuple[int, ...]  # of the policy's tokenizer, with the stop token if the refiner finished
    text: str
    score: Score
    verbatim: bool
    written: int  # tokens that the engine generated
    kept: bool  # whether training uses the pair: the filter of Eq. 6


@dataclass(frozen=True)
class Task:
    """A response to refine, and the refiner's request for it."""

    rollout: Any  # the sampler's
    request: Request


@dataclass
class Refiner:
    """
    Args:
        engine: serves the frozen model to this refiner alone.
        encode: (problem, text of the prompt) -> token ids, through the chat template where prompts go through it.
        template: of the refiner's prompt, with {question}, {response} and perhaps {reward}.
        maximum: the largest reward; responses that have it are not refined. Infinity refines them too.
        most_tokens: the limit on the refiner's prompt and response together.
    """

    engine: Engine
    sampling: Sampling
    tokenizer: Any
    encode: Callable[[Prompt, str], list[int]]
    template: str
    maximum: float
    seed: Callable[..., int]
    options: DynamicOptions
    most_tokens: float = math.inf

    def choose(self, group: list, step: int, trained: list[bool]) -> tuple[list[Task], dict[int, str]]:
        """Return the responses of a group (rollouts of the sampler) to refine, and by sample why others are not."""
        tasks, left = [], {}
        for rollout, worth in zip(group, trained, strict=True):
            reason = self._reason(rollout.score, worth)
            seed = self.seed(step, rollout.prompt_index, rollout.sample, rollout.prompt.index)
            if reason is None and (seed % 1000003 >= self.options.share * 1000003 or len(tasks) == self.options.first):
                reason = NOT_CHOSEN
            task = None if reason else self._task(rollout, seed)
            if task and len(task.request.prompt_ids) + self.sampling.max_tokens > self.most_tokens:
                reason = TOO_LONG
            if reason:
                left[rollout.sample] = reason
            else:
                tasks.append(task)
        return tasks, left

    def _reason(self, score: Score, trained: bool) -> str | None:
        if not score.usable:
            return GRADER_FAILED
        if not trained:
            return NOT_TRAINED
        return AT_MAXIMUM if self.options.filter and score.reward >= self.maximum else None

    def _task(self, rollout: Any, seed: int) -> Task:
        asked = self.template.format(
            question=rollout.prompt.question or rollout.prompt.text,
            response=rollout.text,
            reward=f"{rollout.score.reward:g}",
        )
        ids = tuple(self.encode(rollout.prompt, asked))
        return Task(rollout, Request(0, ids, 1, seed, problem=rollout.prompt))

    def write(self, tasks: list[Task]) -> list[Response]:
        """Generate the refined responses, in the order of the tasks."""
        requests = [replace(task.request, id=number) for number, task in enumerate(tasks)]
        found = {group.id: group.responses[0] for group in self.engine.generate(requests, self.sampling)}
        return [found[number] for number in range(len(tasks))]

    def grade(self, tasks: list[Task], written: list[Response], reward: Reward) -> list[Refined]:
        raw = [self.tokenizer.decode(list(each.token_ids), skip_special_tokens=True) for each in written]
        texts = [clean(text, task.rollout.text) for text, task in zip(raw, tasks, strict=True)]
        scores = reward([task.rollout.prompt for task in tasks], texts) if tasks else []
        return [self._refined(*each) for each in zip(tasks, written, raw, texts, scores, strict=True)]

    def _refined(self, task: Task, written: Response, raw: str, text: str, score: Score) -> Refined:
        if score.error is None and not score.usable:
            score = replace(score, reward=0.0, error=f"the reward is {score.reward:g}")
        original, ids = task.rollout, self._tokens(task.rollout, written, raw, text)
        kept = score.usable and bool(ids) and (score.reward > original.score.reward or not self.options.filter)
        return Refined(ids, text, score, text == original.text, len(written.token_ids), kept)

    def _tokens(self, original: Any, written: Response, raw: str, text: str) -> tuple[int, ...]:
        if text == original.text and written.finish_reason == original.response.finish_reason:
            return original.response.token_ids
        ended = written.token_ids[-1:] if written.finish_reason == "stop" else ()
        special = set(self.tokenizer.all_special_ids)
        if text == raw and not special & set(written.token_ids[: len(written.token_ids) - len(ended)]):
            return written.token_ids
        plain = plain_text(self.tokenizer)
        return (*plain.encode([plain.hidden(text)])[0], *ended)


class Refining:
    """The refinement of one round of sampling. The scoring thread adds groups; whenever the refiner is free it takes
    all waiting tasks, and the scoring thread grades their results, since rewards run in one thread."""

    def __init__(self, refiner: Refiner, reward: Reward, scoring: Executor, step: int):
        self.refiner, self.reward, self.scoring, self.step = refiner, reward, scoring, step
        self.waiting: deque[Task] = deque()
        self.graded: list[tuple[list[Task], Future]] = []
        self.jobs: list[Future] = []
        self.seconds = 0.0
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="refiner")

    def add(self, group: list, trained: list[bool]) -> list:
        """Add a scored group. Returns its responses, with the reason on those that are not refined."""
        tasks, left = self.refiner.choose(group, self.step, trained)
        self.waiting.extend(tasks)
        if tasks and self.refiner.options.overlap:
            self.jobs.append(self.thread.submit(self._write))
        return [replace(each, unrefined=left.get(each.sample, "")) for each in group]

    def _write(self) -> None:
        tasks = [self.waiting.popleft() for _ in range(len(self.waiting))]
        if tasks:
            start = time.perf_counter()
            written = self.refiner.write(tasks)
            self.seconds += time.perf_counter() - start
            self.graded.append((tasks, self.scoring.submit(self.refiner.grade, tasks, written, self.reward)))

    def finish(self, rollouts: list) -> list:
        """Return all responses, with the refined ones. Call this when all groups have been added."""
        with self.thread:
            self.jobs.append(self.thread.submit(self._write))
            for job in self.jobs:
                job.result()
        found = {}
        for tasks, job in self.graded:
            found |= {task.rollout.key: refined for task, refined in zip(tasks, job.result(), strict=True)}
        return [replace(each, refined=found.get(each.key)) for each in rollouts]


def statistics(rollouts: list) -> dict[str, float]:
    """Return the metrics of a step's rollouts, without those whose grader failed."""
    scored = [each for each in rollouts if each.score.error is None]
    refined = [each for each in scored if each.refined and each.refined.score.error is None]
    better = sum(each.refined.score.reward > each.score.reward for each in refined)
    reasons = [each.unrefined for each in rollouts]
    metrics = {
        "improved": better / max(len(scored), 1),
        "refined": len(refined),
        "pairs": sum(each.refined.kept for each in refined),
        "skipped": reasons.count(AT_MAXIMUM),
        "too_long": reasons.count(TOO_LONG),
        "grader_errors": sum(bool(each.refined) for each in scored) - len(refined),
        "refiner_tokens": sum(each.refined.written for each in scored if each.refined),
    }
    if refined:
        metrics |= {
            "refined_reward": fmean([each.refined.score.reward for each in refined]),
            "original_reward": fmean([each.score.reward for each in refined]),
            "verbatim": fmean([each.refined.verbatim for each in refined]),
        }
    return {f"constraint/{name}": float(value) for name, value in metrics.items()}
