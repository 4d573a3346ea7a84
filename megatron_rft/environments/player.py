"""Plays episodes: a response may have several turns of the policy, with an environment's text between them.

`Episodes` is around an engine and has the same `generate`, so the sampler, evaluation and stores need not know. The
tokens of a turn stay as the engine wrote them, and the next turn's prompt is all tokens so far; only the environment's
text is tokenised, once (template.py). Its tokens are outside of `Response.turns`, and losses do not see them.

Turn k of all unfinished episodes of an engine is one wave, in the order of (request, sample), with seeds of its own. So
a response depends neither on timing nor on the time that an environment takes. Environments answer while the rest of
their wave is generated. Where timing decides anyway (rollout.staleness above 1), each episode goes on by itself.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from megatron_rft.environments.process import EnvironmentProcesses, EpisodeFailed, Played, shown
from megatron_rft.environments.template import Template, plain
from megatron_rft.inference.engine import Engine, EngineLost, Group, Request, Sampling, request_seed
from megatron_rft.inference.pool import EnginePool
from megatron_rft.records import Response, Score
from megatron_rft.utils.errors import DataError


@dataclass
class Episode:
    """One response that is being played."""

    request: Request
    sample: int
    played: Played
    prompt_ids: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[tuple[int, ...]] = field(default_factory=list)
    routes: np.ndarray | None = None
    turns: list[tuple[int, int, float]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    version: int = -1
    finish: str | None = None  # the reason why it has ended
    score: Score | None = None

    @property
    def opened(self) -> bool:
        """Whether the environment's first messages follow the problem's prompt."""
        return self.prompt_ids != self.request.prompt_ids

    def room(self, sampling: Sampling) -> int:
        """The number of tokens that it may still have."""
        return sampling.max_tokens - len(self.tokens) - (len(self.prompt_ids) - len(self.request.prompt_ids))

    def add(self, turn: Response) -> None:
        self.version = turn.weight_version if self.version < 0 else self.version
        self.turns.append((len(self.tokens), len(self.tokens) + len(turn.token_ids), 0.0))
        self.tokens += turn.token_ids
        self.logprobs += turn.logprobs
        self.supports += turn.supports
        if turn.routes is not None:  # the engine has read earlier turns again: those that wrote them count
            known = turn.routes[:0] if self.routes is None else self.routes
            self.routes = np.concatenate([known, turn.routes[len(known) :]])

    def hear(self, ids: list[int]) -> None:
        """Append the environment's tokens."""
        self.tokens += ids
        self.logprobs += [0.0] * len(ids)
        self.supports += [()] * len(ids) if self.supports else []

    def end(self, why: str, score: Score | None = None) -> None:
        """`finish` comes last: another thread may take the episode then."""
        self.score = score
        self.finish = why

    def response(self) -> Response:
        prompt_ids = self.prompt_ids if self.opened else None
        whole = tuple(self.tokens), tuple(self.logprobs), self.finish, self.version, tuple(self.supports)
        return Response(*whole, tuple(self.turns), prompt_ids, tuple(self.said), self.score, self.routes)


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
        return {"environment/wait_seconds": max(waited.values(), default=0.0)}

    def close(self) -> None:
        self.processes.close()

    # ---- the episodes of one engine

    def play(self, engine: Engine, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        """Yield a group when all of its episodes have ended. If the engine is lost, the episodes of the others are
        kept: asked again, they go on after their last turn."""
        groups = [self.stuck.pop(request.seed, None) or self._group(request) for request in requests]
        new = [each for group in groups for each in group if not each.played.calls and each.finish is None]
        self._wait(engine, [self.processes.submit(each.played, partial(self._reset, each, sampling)) for each in new])
        try:
            yield from (self._waves if self.at_once is None else self._freely)(engine, groups, sampling)
        except EngineLost:
            self.stuck |= {group[0].request.seed: group for group in groups}
            raise

    def _waves(self, engine: Engine, groups: list[list[Episode]], sampling: Sampling) -> Iterator[Group]:
        yield from ended(groups)
        while engine.agree(bool(wave := self._wave(groups, sampling))):
            jobs: list[Future] = []
            later = any(episode.turns for group in groups for episode in group)  # the engine's cache has turns so far
            try:
                for answer in engine.generate([asked for asked, _ in wave], replace(sampling, continues=later)):
                    pairs = zip(wave[answer.id][1], answer.responses, strict=True)
                    jobs += [self._heard(episode, response, sampling) for episode, response in pairs]
            finally:
                self._wait(engine, jobs)
            yield from ended(groups)

    def _wave(self, groups: list[list[Episode]], sampling: Sampling) -> list[tuple[Request, list[Episode]]]:
        """The requests of the next turn; their ids are their places. The first turn of a group is one request, as
        without an environment, unless the environments' first messages follow the prompt."""
        wave: list[tuple[Request, list[Episode]]] = []
        for group in groups:
            if not any(episode.turns or episode.opened for episode in group):
                most = self._most(sampling.max_tokens)
                wave.append((replace(group[0].request, id=len(wave), max_tokens=most, problem=None), group))
                continue
            for episode in group:
                if episode.finish is None:
                    wave.append((self._request(episode, sampling, len(wave)), [episode]))
        return wave

    def _freely(self, engine: Engine, groups: list[list[Episode]], sampling: Sampling) -> Iterator[Group]:
        """Each episode goes on as soon as its environment has answered."""
        sampling = replace(sampling, continues=True)

        def play(episode: Episode) -> None:
            while episode.finish is None:
                (answer,) = engine.generate([self._request(episode, sampling)], sampling)
                self._heard(episode, answer.responses[0], sampling).result()

        threads = ThreadPoolExecutor(self.at_once, thread_name_prefix="episode")
        try:
            for job in as_completed([threads.submit(play, episode) for group in groups for episode in group]):
                job.result()
                yield from ended(groups)
        finally:
            threads.shutdown(cancel_futures=True)

    def _request(self, episode: Episode, sampling: Sampling, number: int = 0) -> Request:
        seed = request_seed(episode.request.seed, episode.sample, "turn", len(episode.turns))
        prompt = (*episode.prompt_ids, *episode.tokens)
        return Request(number, prompt, 1, seed, self._most(episode.room(sampling)))

    def _most(self, room: int) -> int:
        return min(room, self.turn_tokens or room)

    def _wait(self, engine: Engine, jobs: list[Future]) -> None:
        start = time.perf_counter()
        for job in jobs:
            job.result()
        self.waited[id(engine)] += time.perf_counter() - start

    # ---- one episode, in the thread of its environment's process

    def _group(self, request: Request) -> list[Episode]:
        seeds = [request_seed(request.seed, sample, "environment") for sample in range(request.n)]
        new = self.processes.new
        return [Episode(request, i, new(request.problem, seed), request.prompt_ids) for i, seed in enumerate(seeds)]

    def _reset(self, episode: Episode, sampling: Sampling, ask: Callable[..., Any]) -> None:
        problem = episode.request.problem
        with self._failing(episode):
            if said := ask("reset", prompt=shown(problem), seed=episode.played.seed):
                episode.said.append(plain(said))
                episode.prompt_ids = self.template.opened(problem, said)
            if episode.room(sampling) < 1:
                raise EpisodeFailed("its first messages leave no room (rollout.max_response_tokens)")

    def _heard(self, episode: Episode, response: Response, sampling: Sampling) -> Future:
        return self.processes.submit(episode.played, partial(self._advance, episode, response, sampling))

    def _advance(self, episode: Episode, response: Response, sampling: Sampling, ask: Callable[..., Any]) -> None:
        """Let the environment answer a turn. It does not hear one that was cut off at its most tokens."""
        if episode.finish:  # its environment failed before the group's first turn
            return
        episode.add(response)
        with self._failing(episode):
            if response.finish_reason == "stop":
                why = self._answer(episode, response, sampling, ask)
            else:
                episode.said.append("[the turn was cut off at its most tokens]")
                why = response.finish_reason
            if why:
                score = ask("end")
                episode.end(why, score and Score(**score))

    def _answer(self, episode: Episode, response: Response, sampling: Sampling, ask: Callable[..., Any]) -> str | None:
        """Returns the reason why the episode ends, or None."""
        ids = list(response.token_ids)
        turn = ask("step", text=self.decode(ids))
        episode.turns[-1] = (*episode.turns[-1][:2], turn["reward"])
        if turn["text"]:
            episode.said.append(plain(turn["text"]))
        if turn["done"] or len(episode.turns) == self.max_turns:
            return "stop"
        between = self.template.after_turn(episode.request.problem, turn["text"], ids[-1])
        if episode.room(sampling) <= len(between):
            episode.said.append("[the episode ended at rollout.max_response_tokens]")
            return "length"
        episode.hear(between)
        return None

    @contextmanager
    def _failing(self, episode: Episode) -> Iterator[None]:
        """Turn a failure of the environment into a score with an error, which is no reward."""
        try:
            yield
        except (EpisodeFailed, DataError) as error:
            where = f"environment {self.name}, problem {episode.request.problem.index}, turn {len(episode.turns)}"
            episode.end("abort", Score(0.0, error=f"{where}: {error}"))


def ended(groups: list[list[Episode]]) -> Iterator[Group]:
    """Yield and remove the groups whose episodes have all ended."""
    done = [group for group in groups if all(episode.finish for episode in group)]
    groups[:] = [group for group in groups if not all(episode.finish for episode in group)]
    for group in done:
        yield Group(group[0].request.id, tuple(episode.response() for episode in group))
