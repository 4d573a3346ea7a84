"""Plays episodes: a response may have several turns of the policy, with an environment's text between them.

`Episodes` is around an engine and has the same `generate`, so the sampler, evaluation and stores need not know. The
tokens of a turn stay as the engine wrote them, and the next turn's prompt is all tokens so far; only the environment's
text is tokenised, once (template.py). Its tokens are outside of `Response.turns`, and losses do not see them.

Turn k of all unfinished episodes of an engine is one wave, in the order of (request, sample), with seeds of its own. So
a response depends neither on timing nor on the time that an environment takes. Environments answer while the rest of
their wave is generated. Where timing decides anyway (rollout.staleness above 1), each episode goes on by itself.
"""

import hashlib
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rft.data.images import filled, joined, keep
from megatron_rft.environments.base import Message
from megatron_rft.environments.kept import Kept
from megatron_rft.environments.process import EnvironmentProcesses, EpisodeEnvironment, EpisodeFailed, shown
from megatron_rft.environments.template import Template, plain, seen
from megatron_rft.inference.engine import Engine, EngineLost, Group, Request, Sampling, request_seed
from megatron_rft.inference.pool import EnginePool
from megatron_rft.records import Response, Score
from megatron_rft.utils.errors import CodeError, DataError


@dataclass
class Episode:
    """One response that is being played. It has no `finish_reason` until it has ended."""

    request: Request
    sample: int
    environment: EpisodeEnvironment
    longest: int
    response: Response = Response((), (), "", -1)
    images: Any = None  # the problem's, then those that the environment has shown so far
    key: str = ""  # of kept.py

    @property
    def ended(self) -> bool:
        return bool(self.response.finish_reason)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens so far, with the prompt's."""
        return (*(self.response.prompt_ids or self.request.prompt_ids), *self.response.token_ids)

    @property
    def room(self) -> int:
        """The number of tokens that it may still have. The environment's first messages count."""
        given, prompt = len(self.request.prompt_ids), len(self.response.prompt_ids or self.request.prompt_ids)
        return self.longest - len(self.response.token_ids) - (prompt - given)

    @property
    def seed(self) -> int:
        """Of the next turn."""
        return turn_seed(self.request, self.sample, self.tokens)

    @property
    def continues(self) -> bool:
        """Whether its next turn continues one."""
        return bool(self.response.turns)

    def set(self, **fields: Any) -> None:
        self.response = replace(self.response, **fields)

    def say(self, text: str | list[Message]) -> None:
        self.set(said=(*self.response.said, plain(text)))

    def add(self, turn: Response) -> None:
        """Append a turn of the policy."""
        first, routes = len(self.response.token_ids), turn.routes
        if self.response.routes is not None:  # the engine has read earlier turns again: those that wrote them count
            routes = np.concatenate([self.response.routes, routes[len(self.response.routes) :]])
        version = self.response.weight_version if self.response.turns else turn.weight_version
        turns = (*self.response.turns, (first, first + len(turn.token_ids), 0.0))
        self.set(turns=turns, weight_version=version, routes=routes)
        self.hear(turn.token_ids, turn.logprobs, turn.supports)

    def hear(self, ids: Sequence[int], logprobs: Sequence[float], supports: Sequence[tuple[int, ...]]) -> None:
        had = self.response
        tokens, scores = (*had.token_ids, *ids), (*had.logprobs, *logprobs)
        self.set(token_ids=tokens, logprobs=scores, supports=(*had.supports, *supports))


@dataclass
class Episodes(Engine):
    """
    Args:
        name: of the environment, for messages.
        decode: a turn's tokens -> the text that the environment hears.
        turn_tokens: the most tokens of a turn. `Sampling.max_tokens` limits the whole episode.
        at_once: the most episodes of an engine that play at the same time, each at its own pace; None: in waves.
    """

    engine: Engine
    processes: EnvironmentProcesses
    template: Template
    decode: Callable[[list[int]], str]
    name: str
    max_turns: int
    turn_tokens: int | None = None
    at_once: int | None = None
    album: Path = Path()  # the folder for images of episodes
    kept: Kept | None = None  # what a killed run has played
    waited: Counter[int] = field(default_factory=Counter)  # engine -> seconds without generation, since `statistics`
    stuck: dict[int, list[Episode]] = field(default_factory=dict)  # by the seeds of requests that lost engines left

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        if isinstance(self.engine, EnginePool):
            return self.engine.generate(requests, sampling, self.play)
        return self.play(self.engine, requests, sampling)

    def begin(self, requests: list[Request], sampling: Sampling, left: list[Request]) -> Iterator[Group]:
        return self.engine.begin(requests, sampling, left, self.play)

    def retry(self, left: list[Request], sampling: Sampling) -> Iterator[Group]:
        return self.engine.retry(left, sampling, self.play)

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.engine.load_weights(stream, version)

    def checksums(self) -> dict[str, int | None]:
        return self.engine.checksums()

    def statistics(self) -> dict[str, float]:
        waited, self.waited = self.waited, Counter()
        return {"environment/wait_seconds": max(waited.values(), default=0.0)} | self.engine.statistics()

    def take_news(self) -> list[str]:
        return self.engine.take_news()

    def driver(self) -> tuple[int | None, int]:
        return self.engine.driver()

    def close(self) -> None:
        self.processes.close()
        if self.kept:
            self.kept.close()

    # ---- the episodes of one engine

    def play(self, engine: Engine, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        """Yield a group when all of its episodes have ended. If the engine is lost, the episodes of the others are
        kept: asked again, they go on after their last turn."""
        groups = [
            self.stuck.pop(request.seed, None)
            or [self._episode(request, i, sampling.max_tokens) for i in range(request.n)]
            for request in requests
        ]
        if self.kept:
            self.kept.begin([episode for group in groups for episode in group])
        try:
            yield from self._played(engine, groups, sampling)
        except EngineLost:
            self.stuck |= {group[0].request.seed: group for group in groups}
            raise

    def _episode(self, request: Request, sample: int, longest: int) -> Any:
        images = request.problem.images if request.problem else None
        return Episode(request, sample, self.processes.new(), longest, images=images)

    def _played(self, engine: Engine, groups: list[list[Any]], sampling: Sampling) -> Iterator[Group]:
        new = [each for group in groups for each in group if not each.environment.calls and not each.ended]
        self._wait(engine, [each.environment.submit(self._reset, each) for each in new])
        yield from (self._waves if self.at_once is None else self._freely)(engine, groups, sampling)

    def _waves(self, engine: Engine, groups: list[list[Any]], sampling: Sampling) -> Iterator[Group]:
        together = [episode for group in groups for episode in group]
        yield from ended(groups)
        while engine.agree(bool(wave := self._wave(groups))):
            jobs: list[Future] = []
            later = any(episode.continues for group in groups for episode in group)  # the cache has turns so far
            try:
                for answer in engine.generate([asked for asked, _ in wave], replace(sampling, continues=later)):
                    for asked, turn in zip(wave[answer.id][1], answer.responses, strict=True):
                        jobs.append(self._give(asked, turn))
            finally:
                self._wait(engine, jobs)
            yield from ended(groups)
        if self.kept:
            self.kept.put(together)

    def _give(self, episode: Any, turn: Response) -> Future:
        """Give a turn to the episode that asked for it. The result is there when the episode asks again, or has
        ended."""
        return episode.environment.submit(self._advance, episode, turn)

    def _wave(self, groups: list[list[Any]]) -> list[tuple[Request, list[Any]]]:
        """The requests of the next turn; their ids are their places. The first turn of a group is one request, as
        without an environment, unless the environments' first messages follow the prompt."""
        wave: list[tuple[Request, list[Episode]]] = []
        for group in groups:
            if any(episode.response.turns or episode.response.prompt_ids for episode in group):
                wave += [(self._request(episode), [episode]) for episode in group if not episode.ended]
            else:
                wave.append((replace(group[0].request, max_tokens=self.turn_tokens), group))
        return [(replace(request, id=place), episodes) for place, (request, episodes) in enumerate(wave)]

    def _freely(self, engine: Engine, groups: list[list[Any]], sampling: Sampling) -> Iterator[Group]:
        """Each episode goes on as soon as its environment has answered."""
        sampling = replace(sampling, continues=True)
        threads = ThreadPoolExecutor(self.at_once, thread_name_prefix="episode")
        try:
            alone = [threads.submit(self._alone, engine, each, sampling) for group in groups for each in group]
            for job in as_completed(alone):
                job.result()
                yield from ended(groups)
        finally:
            threads.shutdown(cancel_futures=True)

    def _alone(self, engine: Engine, episode: Any, sampling: Sampling) -> None:
        while not episode.ended:
            (answer,) = engine.generate([self._request(episode)], sampling)
            self._give(episode, answer.responses[0]).result()
        if self.kept:
            self.kept.put([episode])

    def _request(self, episode: Episode) -> Request:
        room = episode.room
        problem = episode.request.problem and replace(episode.request.problem, images=episode.images)
        return Request(0, episode.tokens, 1, episode.seed, min(room, self.turn_tokens or room), problem)

    def _wait(self, engine: Engine, jobs: list[Future]) -> None:
        start = time.perf_counter()
        for job in jobs:
            job.result()
        self.waited[id(engine)] += time.perf_counter() - start

    # ---- one episode, in the thread of its environment's process

    def _reset(self, episode: Episode) -> None:
        problem, seed = episode.request.problem, request_seed(episode.request.seed, episode.sample, "environment")
        with self._failing(episode):
            if said := episode.environment.ask("reset", prompt=shown(problem), seed=seed):
                episode.say(said)
                images = seen(said, episode.images)
                episode.set(prompt_ids=self.template.opened(problem, said, images))
                episode.images = joined(episode.images, images)
            if episode.room < 1:
                raise EpisodeFailed("its first messages leave no room (rollout.max_response_tokens)")

    def _advance(self, episode: Episode, turn: Response) -> None:
        """Let the environment answer a turn. It does not hear one that was cut off at its most tokens."""
        if episode.ended:  # its environment failed before the group's first turn
            return
        episode.add(turn)
        with self._failing(episode):
            if turn.finish_reason == "stop":
                why = self._answer(episode)
            else:
                episode.say("[the turn was cut off at its most tokens]")
                why = turn.finish_reason
            if why:
                score = episode.environment.ask("end")
                shown = episode.images is not episode.request.problem.images
                key = keep(self.album, episode.response.weight_version, [episode.images]) if shown else None
                episode.set(finish_reason=why, score=score and Score(**score), images=key)

    def _answer(self, episode: Episode) -> str | None:
        """Returns the reason why the episode ends, or None."""
        *before, (first, end, _) = episode.response.turns
        ids = list(episode.response.token_ids[first:end])
        turn = episode.environment.ask("step", text=self.decode(ids))
        episode.set(turns=(*before, (first, end, turn["reward"])))
        if turn["text"]:
            episode.say(turn["text"])
        if turn["done"] or len(episode.response.turns) == self.max_turns:
            return "stop"
        images = seen(turn["text"], episode.images)
        between = filled(self.template.after_turn(episode.request.problem, turn["text"], ids[-1]), images)
        if episode.room <= len(between):
            episode.say("[the episode ended at rollout.max_response_tokens]")
            return "length"
        episode.images = joined(episode.images, images)
        episode.hear(between, [0.0] * len(between), [()] * len(between) if episode.response.supports else [])
        return None

    @contextmanager
    def _failing(self, episode: Episode) -> Iterator[None]:
        """Turn a failure of the environment into a score with an error, which is no reward.

        Raises:
            CodeError: the environment returned what can never be used.
        """
        try:
            yield
        except (EpisodeFailed, DataError, CodeError) as error:
            number = len(episode.response.turns)
            where = f"environment {self.name}, problem {episode.request.problem.index}, turn {number}"
            if isinstance(error, CodeError):
                raise CodeError(f"{where}: {error}") from None
            episode.set(finish_reason="abort", score=Score(0.0, error=f"{where}: {error}"))


def turn_seed(request: Request, sample: int, prompt: Sequence[int], occurrence: int = 0, *images: str) -> int:
    """The seed of a turn. It depends on its prompt, a digest of its images, and how often the episode asked that."""
    asked = hashlib.blake2b(array("q", prompt)).hexdigest()
    return request_seed(request.seed, sample, "turn", asked, occurrence, *images)


def ended(groups: list[list[Any]]) -> Iterator[Group]:
    """Yield and remove the groups whose episodes have all ended."""
    done = [group for group in groups if all(episode.ended for episode in group)]
    groups[:] = [group for group in groups if not all(episode.ended for episode in group)]
    for group in done:
        yield Group(group[0].request.id, tuple(episode.response for episode in group))
