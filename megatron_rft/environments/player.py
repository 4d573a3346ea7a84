"""Plays episodes: a response may have several turns of the policy, with an environment's text between them.

`Episodes` is around an engine and has the same `generate`, so the sampler, evaluation and stores need not know. The
tokens of a turn stay as the engine wrote them, and the next turn's prompt is all tokens so far; only the environment's
text is tokenised, once (template.py). Its tokens are outside of `Response.turns`, and losses do not see them.

Turn k of all unfinished episodes is one wave, in the order of (request, sample), with seeds of its own. So a response
depends neither on timing nor on the time that an environment takes. Environments answer while the rest of their wave
is generated.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from megatron_rft.environments.process import EnvironmentProcesses, EpisodeFailed, Played, shown
from megatron_rft.environments.template import Template, plain
from megatron_rft.inference.engine import Engine, Generate, Group, Request, Sampling, request_seed
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

    def hear(self, ids: list[int]) -> None:
        """Append the environment's tokens."""
        self.tokens += ids
        self.logprobs += [0.0] * len(ids)
        self.supports += [()] * len(ids) if self.supports else []

    def end(self, why: str, score: Score | None = None) -> None:
        self.finish, self.score = why, score

    def response(self) -> Response:
        prompt_ids = self.prompt_ids if self.opened else None
        whole = tuple(self.tokens), tuple(self.logprobs), self.finish, self.version, tuple(self.supports)
        return Response(*whole, tuple(self.turns), prompt_ids, tuple(self.said), self.score)


@dataclass
class Episodes(Engine):
    """
    Args:
        name: of the environment, for messages.
        decode: a turn's tokens -> the text that the environment hears.
        turn_tokens: the most tokens of a turn. `Sampling.max_tokens` limits the whole episode.
    """

    engine: Engine
    processes: EnvironmentProcesses
    template: Template
    decode: Callable[[list[int]], str]
    name: str
    max_turns: int
    turn_tokens: int | None = None
    waited: float = 0.0  # seconds since the last `statistics` in which nothing was generated
    failed: int = 0  # episodes since the last `statistics`
    stuck: dict[int, list[Episode]] = field(default_factory=dict)  # by the seeds of requests that lost engines left

    def generate(self, requests: list[Request], sampling: Sampling) -> Iterator[Group]:
        if not isinstance(self.engine, EnginePool):
            yield from self._play(self._begun(requests, sampling), sampling, self.engine.generate)
            return
        left: list[Request] = []
        yield from self.begin(requests, sampling, left)
        yield from self.retry(left, sampling)

    def begin(self, requests: list[Request], sampling: Sampling, left: list[Request]) -> Iterator[Group]:
        """As `EnginePool.begin`. The episodes of `left` are kept, and `retry` continues them after their last turn."""
        yield from self._continued(self._begun(requests, sampling), sampling, left)

    def retry(self, left: list[Request], sampling: Sampling) -> Iterator[Group]:
        def again(requests: list[Request], sampling: Sampling, more: list[Request]) -> Iterator[Group]:
            return self._continued([self.stuck.pop(request.seed) for request in requests], sampling, more)

        yield from self.engine.retry(left, sampling, again)

    def load_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.engine.load_weights(stream, version)

    def checksums(self) -> dict[str, int | None]:
        return self.engine.checksums()

    def statistics(self) -> dict[str, float]:
        found = {"environment/wait_seconds": self.waited, "environment/errors": float(self.failed)}
        self.waited, self.failed = 0.0, 0
        return found

    def close(self) -> None:
        self.processes.close()

    # ---- waves

    def _continued(self, groups: list[list[Episode]], sampling: Sampling, left: list[Request]) -> Iterator[Group]:
        yield from self._play(groups, sampling, partial(self.engine.begin, left=[]))
        for group in groups:
            if any(episode.finish is None for episode in group):
                left.append(group[0].request)
                self.stuck[group[0].request.seed] = group

    def _play(self, groups: list[list[Episode]], sampling: Sampling, generate: Generate) -> Iterator[Group]:
        """Yield a group when all of its episodes have ended; those of lost engines stay as they are."""
        wave, progress = self._wave(groups, sampling), True
        while self.engine.agree(bool(wave) and progress):
            jobs: list[Future] = []
            for answer in generate([request for request, _ in wave.values()], self._sampling(groups, sampling)):
                _, episodes = wave[answer.id]
                jobs += [
                    self.processes.submit(episode.played, partial(self._advance, episode, response, sampling))
                    for episode, response in zip(episodes, answer.responses, strict=True)
                ]
            self._wait(jobs)
            progress = bool(jobs)
            yield from self._ended(groups)
            wave = self._wave(groups, sampling)

    def _sampling(self, groups: list[list[Episode]], sampling: Sampling) -> Sampling:
        """The engine's cache has the turns so far."""
        return replace(sampling, continues=any(episode.turns for group in groups for episode in group))

    def _wave(self, groups: list[list[Episode]], sampling: Sampling) -> dict[int, tuple[Request, list[Episode]]]:
        """The requests of the next turn, by their ids. The first turn of a group is one request, as without an
        environment, unless the environments' first messages follow the prompt."""
        wave: dict[int, tuple[Request, list[Episode]]] = {}
        for group in groups:
            if not any(episode.turns or episode.opened for episode in group):
                whole = replace(
                    group[0].request, id=len(wave), max_tokens=self._most(sampling.max_tokens), problem=None
                )
                wave[len(wave)] = whole, group
                continue
            for episode in group:
                if episode.finish is None:
                    wave[len(wave)] = self._request(len(wave), episode, sampling), [episode]
        return wave

    def _request(self, number: int, episode: Episode, sampling: Sampling) -> Request:
        seed = request_seed(episode.request.seed, episode.sample, "turn", len(episode.turns))
        prompt = (*episode.prompt_ids, *episode.tokens)
        return Request(number, prompt, 1, seed, self._most(episode.room(sampling)))

    def _most(self, room: int) -> int:
        return min(room, self.turn_tokens or room)

    def _wait(self, jobs: list[Future]) -> None:
        start = time.perf_counter()
        for job in jobs:
            job.result()
        self.waited += time.perf_counter() - start

    def _ended(self, groups: list[list[Episode]]) -> Iterator[Group]:
        """Yield and remove the groups whose episodes have all ended."""
        ended = [group for group in groups if all(episode.finish for episode in group)]
        groups[:] = [group for group in groups if not all(episode.finish for episode in group)]
        for group in ended:
            self.failed += sum(bool(episode.score and episode.score.error) for episode in group)
            yield Group(group[0].request.id, tuple(episode.response() for episode in group))

    # ---- one episode, in the thread of its environment's process

    def _begun(self, requests: list[Request], sampling: Sampling) -> list[list[Episode]]:
        groups = [[self._episode(request, sample) for sample in range(request.n)] for request in requests]
        self._wait(
            [
                self.processes.submit(episode.played, partial(self._reset, episode, sampling))
                for group in groups
                for episode in group
            ]
        )
        return groups

    def _episode(self, request: Request, sample: int) -> Episode:
        seed = request_seed(request.seed, sample, "environment")
        return Episode(request, sample, self.processes.new(request.problem, seed), request.prompt_ids)

    def _reset(self, episode: Episode, sampling: Sampling, ask: Callable[..., Any]) -> None:
        problem = episode.request.problem
        with self._failing(episode):
            if said := ask("reset", prompt=shown(problem), seed=episode.played.seed):
                episode.said.append(plain(said))
                episode.prompt_ids = self.template.opened(problem, said)
            if episode.room(sampling) < 1:
                raise EpisodeFailed("its first messages leave no room (rollout.max_response_tokens)")

    def _advance(self, episode: Episode, response: Response, sampling: Sampling, ask: Callable[..., Any]) -> None:
        """Let the environment answer a turn. It does not hear one that was cut off at its most tokens."""
        if episode.finish:  # its environment failed before the group's first turn
            return
        episode.add(response)
        with self._failing(episode):
            if response.finish_reason == "stop":
                self._answer(episode, response, sampling, ask)
            else:
                episode.said.append("[the turn was cut off at its most tokens]")
                episode.end(response.finish_reason)
            if episode.finish:
                score = ask("end")
                episode.score = score and Score(**score)

    def _answer(self, episode: Episode, response: Response, sampling: Sampling, ask: Callable[..., Any]) -> None:
        ids = list(response.token_ids)
        turn = ask("step", text=self.decode(ids))
        episode.turns[-1] = (*episode.turns[-1][:2], turn["reward"])
        if turn["text"]:
            episode.said.append(plain(turn["text"]))
        if turn["done"] or len(episode.turns) == self.max_turns:
            episode.end("stop")
            return
        between = self.template.after_turn(episode.request.problem, turn["text"], ids[-1])
        if episode.room(sampling) <= len(between):
            episode.said.append("[the episode ended at rollout.max_response_tokens]")
            episode.end("length")
        else:
            episode.hear(between)

    @contextmanager
    def _failing(self, episode: Episode) -> Iterator[None]:
        """Turn a failure of the environment into a score with an error, which is no reward."""
        try:
            yield
        except (EpisodeFailed, DataError) as error:
            where = f"environment {self.name}, problem {episode.request.problem.index}, turn {len(episode.turns)}"
            episode.end("abort", Score(0.0, error=f"{where}: {error}"))
