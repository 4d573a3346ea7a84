"""Plays episodes of programs (program.py) with an engine, in waves or each at its own pace."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_rft.config.environment import Program
from megatron_rft.environments.endpoint import Endpoint
from megatron_rft.environments.messages import Spoken
from megatron_rft.environments.player import Episodes
from megatron_rft.environments.program import Ask, ProgramEpisode, World
from megatron_rft.inference.engine import Engine, Group, Request, Sampling, request_seed
from megatron_rft.records import Response
from megatron_rft.utils.files import temporary_folder


@dataclass
class Programs(Episodes):
    """`at_once`: not None where each episode goes at its own pace. `processes` grade."""

    options: Program = field(kw_only=True)

    def __post_init__(self):
        for member in self.processes.members:
            member.limit = "environment.episode_timeout_s"
        self._first, self.folders = threading.Lock(), ExitStack()
        self.living: set[ProgramEpisode] = set()

    @cached_property
    def threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.options.programs, thread_name_prefix="program")

    @cached_property
    def folder(self) -> Path:
        """For the episodes' folders; not below the run's folder, which may be slow, and whose path may be long. A
        resumed run has the same one, because a program may tell the policy where it is."""
        rank = os.path.abspath(f"{self.processes.members[0].log}")
        return self.folders.enter_context(temporary_folder(f"megatron-rft-{request_seed(rank):x}"))

    @cached_property
    def world(self) -> World:
        spoken = Spoken(self.template.tokenizer, self.template.stops)
        endpoint = Endpoint(self.options.host)
        return World(self.options, self.template, spoken, self.folder, endpoint, self.album, self.kept)

    def close(self) -> None:
        for episode in list(self.living):
            episode.close()
        if (world := vars(self).pop("world", None)) is not None:
            world.endpoint.close()
        self.folders.close()
        if "threads" in vars(self):
            self.threads.shutdown(cancel_futures=True)
        super().close()

    # ---- the episodes of one engine

    def _episode(self, request: Request, sample: int, longest: int) -> ProgramEpisode:
        with self._first:
            world = self.world
        grader = self.processes.new() if self.options.score else None
        return ProgramEpisode(world, request, sample, longest, grader)

    def _played(self, engine: Engine, groups: list[list[Any]], sampling: Sampling) -> Iterator[Group]:
        """In waves as many groups at a time as `programs` allows."""
        if self.at_once is not None:
            yield from self._freely(engine, groups, sampling)
            return
        while engine.agree(bool(groups)):
            count = max(1, self.options.programs // len(groups[0])) if groups else 0
            part = groups[:count]
            new = [episode for group in part for episode in group if episode.process is None and not episode.ended]
            self._wait(engine, [self.threads.submit(self._start, episode) for episode in new])
            try:
                yield from self._waves(engine, part, sampling)
            finally:
                groups[:count] = part  # those that a lost engine has left

    def _start(self, episode: ProgramEpisode) -> None:
        self.living.add(episode)
        episode.start()
        self._settled(episode)

    def _settled(self, episode: ProgramEpisode) -> None:
        if episode.ended:
            self.living.discard(episode)

    def _wave(self, groups: list[list[Any]]) -> list[tuple[Request, list[Any]]]:
        """All open requests. Where a group's first ones are the problem's own prompt, they are one, as without a
        program."""
        wave: list[tuple[Request, list[Any]]] = []
        for group in groups:
            asks = [episode.take() for episode in group]
            open = [ask for each in asks for ask in each]
            alone = all(len(each) == 1 for each, episode in zip(asks, group, strict=True) if not episode.ended)
            request = group[0].request
            images = request.problem.images if request.problem and request.problem.images_key >= 0 else None
            first = all((a.prompt, a.occurrence, a.images) == (request.prompt_ids, 0, images) for a in open)
            if open and first and alone and len({ask.max_tokens for ask in open}) == 1:
                request = replace(request, max_tokens=open[0].max_tokens)
                wave.append((request, [each[0] if each else None for each in asks]))
            else:
                wave += [(_request(ask), [ask]) for ask in open]
        return [(replace(request, id=place), asks) for place, (request, asks) in enumerate(wave)]

    def _give(self, ask: Ask | None, turn: Response) -> Future:
        """`ask`: None for an episode of a group that has ended before its first turn."""
        return self.threads.submit(self._given, ask, turn)

    def _given(self, ask: Ask | None, turn: Response) -> None:
        if ask is not None:
            ask.episode.give(ask, turn)
            ask.episode.settle()
            self._settled(ask.episode)

    def _alone(self, engine: Engine, episode: ProgramEpisode, sampling: Sampling) -> None:
        if episode.process is None and not episode.ended:
            self._start(episode)
        while not episode.ended:
            asks = episode.take()
            requests = [replace(_request(ask), id=place) for place, ask in enumerate(asks)]
            for answer in engine.generate(requests, sampling):
                episode.give(asks[answer.id], answer.responses[0])
            episode.settle()
            self._settled(episode)
        if self.kept:
            self.kept.put([episode])


def _request(ask: Ask) -> Request:
    problem = ask.episode.request.problem
    return Request(0, ask.prompt, 1, ask.seed, ask.max_tokens, problem and replace(problem, images=ask.images))
