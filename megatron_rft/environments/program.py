"""An episode of a program that talks to the endpoint: its requests are the environment, the policy's turns answer them.

The program runs in a session of its own, below a process that kills all that it started. It has a clock, which stands
still while it waits for the policy. It ends by exiting; then its endpoint closes, what it started is killed, and its
working folder is graded.
"""

import contextlib
import json
import os
import secrets
import subprocess
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron_rft.config.environment import Program
from megatron_rft.data.images import filled, joined, keep
from megatron_rft.environments.base import Message
from megatron_rft.environments.kept import Kept
from megatron_rft.environments.messages import Spoken
from megatron_rft.environments.player import turn_seed
from megatron_rft.environments.process import EpisodeEnvironment, EpisodeFailed, row_of, shown
from megatron_rft.environments.template import Template, plain, seen
from megatron_rft.environments.turns import PolicyTurn, Tree
from megatron_rft.inference.engine import Request, request_seed
from megatron_rft.records import Prompt, Response, Score
from megatron_rft.utils.end_with_parent import remove_folder
from megatron_rft.utils.errors import DataError
from megatron_rft.utils.processes import absolute, activity, end_reaper, start_helper

SETTLE_S = 0.01  # a wave waits until a program that has asked neither asks nor computes for this time
LONGEST_SETTLE_S = 1.0
MODEL = "policy"  # its name at the endpoint
KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE")
LOG_TAIL = 600  # bytes of a program's output in a message


class Refused(Exception):
    """A request that is answered by an error in the API's form."""

    def __init__(self, status: int, message: str, code: str = "unsupported"):
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(eq=False)
class Ask:
    """An open request for a turn. `answer`: of (message, turn)."""

    episode: "ProgramEpisode"
    messages: list[Message]
    tools: Any
    parent: PolicyTurn | None
    said: list[Message]
    images: Any  # those of `prompt`
    between: tuple[int, ...]
    prompt: tuple[int, ...]
    occurrence: int
    seed: int
    max_tokens: int
    stop: list[str]
    answer: Future = field(default_factory=Future)
    number: int | None = None  # in the order of sampling


@dataclass(frozen=True)
class World:
    """What the episodes of a rank share. `endpoint`: of endpoint.py, which needs this module."""

    options: Program
    template: Template
    spoken: Spoken
    folder: Path
    endpoint: Any
    album: Path
    kept: Kept | None = None


class ProgramEpisode:
    """
    Args:
        longest: the most tokens of a segment behind the problem's prompt, or what is in its place.
        grader: for the user's score.
    """

    def __init__(self, world: World, request: Request, sample: int, longest: int, grader: EpisodeEnvironment | None):
        self.world, self.request, self.sample, self.longest, self.grader = world, request, sample, longest, grader
        self.secret, self.tree, self.jobs = secrets.token_urlsafe(24), Tree(), defaultdict(list)  # of endpoint.py
        self.response = Response((), (), "", -1)
        self.key, self.calls = "", {}  # of kept.py: what was asked -> a checksum of what was sampled
        self.open: list[Ask] = []
        self.asked: Counter[tuple] = Counter()  # prompts, with a digest of their images
        self.turns = self.segments = self.numbers = 0
        self.followed: set[PolicyTurn] = set()  # turns that a request has continued
        self.conversation: list[Message] = []
        self.refused: str | None = None  # the limit that the program has reached
        self.process: subprocess.Popen | None = None
        self.exited = self.closed = self.ending = False
        self.left, self.since, self.arrived = world.options.episode_timeout_s, 0.0, 0.0
        self.computed, self.seen, self.unsent = 0.0, None, 0
        self.busy: float | None = None  # since a turn: seconds of computing, and SETTLE_S for each look at its sleep
        self.changed = threading.Condition()

    @property
    def ended(self) -> bool:
        return bool(self.response.finish_reason)

    @property
    def continues(self) -> bool:
        return bool(self.tree.turns)

    # ---- the endpoint's side

    def ask(self, messages: list[Message], tools: Any, n: int, most: int | None, stop: list[str]) -> list[Ask]:
        """Open requests for `n` turns. Raises Refused."""
        parent, said = self.tree.place(messages, tools)
        try:
            json.dumps([said, tools, stop], ensure_ascii=False).encode()
            template = self.world.template
            ids = template.between(said, parent.tokens[-1]) if parent else template.conversation(said, tools)
            own, images = parent and parent.images, seen(said, self._problem.images)
            between, images = tuple(filled(ids, images)), joined(own, images)
        except (DataError, UnicodeEncodeError) as error:
            raise Refused(400, f"messages, tools or stop: {error}", "invalid_messages") from None
        prompt = (*(parent.tokens if parent else ()), *between)
        room = len(self.request.prompt_ids) + self.longest - len(prompt)
        if room < 1:
            what = f"This model's maximum context length is {len(prompt) + room} tokens (rollout.max_response_tokens)."
            raise self._limit(f"{what} However, your messages have {len(prompt)}.", "context_length_exceeded")
        limit = min(filter(None, (room, self.world.options.turn_tokens, most)))
        with self.changed:
            self._count(parent, n)
            key = (prompt, images.digest) if images else (prompt,)
            first, self.asked[key] = self.asked[key], self.asked[key] + n
            places = range(first, first + n)
            seeds = [turn_seed(self.request, self.sample, prompt, place, *key[1:]) for place in places]
            given = (messages, tools, parent, said, images, between, prompt)
            asks = [Ask(self, *given, *each, limit, stop) for each in zip(places, seeds, strict=True)]
            self._tick()
            self.open += asks
            self.arrived, self.busy = time.monotonic(), None
            self.changed.notify_all()
        return asks

    def _count(self, parent: PolicyTurn | None, n: int) -> None:
        options = self.world.options
        if self.closed:
            raise Refused(410, "the episode has ended", "episode_ended")
        if self.turns + n > options.max_turns:
            raise self._limit(f"the episode has had its {options.max_turns} turns (environment.max_turns)", "max_turns")
        new = n - (parent is not None and parent not in self.followed)
        if self.segments + new > options.max_segments:
            what = f"the episode has had its {options.max_segments} segments (environment.max_segments)"
            raise self._limit(what, "max_segments")
        self.turns, self.segments = self.turns + n, self.segments + new
        if parent is not None:
            self.followed.add(parent)

    def _limit(self, what: str, code: str) -> Refused:
        self.refused = what
        return Refused(400, what, code)

    # ---- the player's side

    def start(self) -> None:
        """Start the program, and wait until it asks or has ended."""
        self.since = time.monotonic()
        try:
            self._start()
        except (OSError, EpisodeFailed) as error:
            self._fail(f"{self.world.options.command[0]} does not start: {error}")
        self.settle()

    def _start(self) -> None:
        options, folder = self.world.options, self.world.folder
        names = f"{request_seed(self.request.seed, self.sample):x}", self.secret[:12].replace("-", "_")
        self.folder = next(folder / name for name in names if not (folder / name).exists())  # one may be left
        for part in ("work", "home", "tmp"):
            (self.folder / part).mkdir(parents=True, mode=0o700)
        images = {"images": self._problem.images.urls()} if self._problem.images else {}
        (self.folder / "row.json").write_text(json.dumps(row_of(self._problem) | images, default=str))
        self.process = start_helper(
            [absolute(part) for part in options.command],
            reap=True,
            remove=folder,
            log=self.folder / "log",
            cwd=self.folder / "work",
            env=self._environment(self.world.endpoint.open(self)),
        )
        self.world.endpoint.watch(os.pidfd_open(self.process.pid), self._left)

    @property
    def _problem(self) -> Prompt:
        assert self.request.problem is not None, "an episode without a problem"
        return self.request.problem

    def _environment(self, url: str) -> dict[str, str]:
        """What the program finds: where to ask, and nothing of the run."""
        found = {name: os.environ[name] for name in KEPT if name in os.environ}
        own = {"HOME": "home", "TMPDIR": "tmp", "MEGATRON_RFT_ROW": "row.json"}
        seed = request_seed(self.request.seed, self.sample, "environment") % 2**32
        found |= {name: str(self.folder / path) for name, path in own.items()}
        found |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "ANTHROPIC_BASE_URL": url}
        found |= {"OPENAI_API_KEY": self.secret, "ANTHROPIC_API_KEY": self.secret}
        return found | {"MEGATRON_RFT_MODEL": MODEL, "PYTHONHASHSEED": "0", "MEGATRON_RFT_SEED": str(seed)}

    def _left(self) -> None:
        with self.changed:
            self.exited = True
            self.changed.notify_all()

    def take(self) -> list[Ask]:
        """The open requests, in an order that does not depend on time."""
        with self.changed:
            asks = sorted(self.open, key=lambda ask: ask.seed)
            for ask in asks:
                if ask.number is None:
                    ask.number, self.numbers = self.numbers, self.numbers + 1
            return asks

    def give(self, ask: Ask, sampled: Response) -> None:
        """Record a turn, and answer the request with it."""
        message, sampled = self.world.spoken.message(ask.prompt, sampled, ask.tools, ask.stop, str(ask.number))
        with self.changed:
            if ask not in self.open:  # the episode has ended
                return
            assert ask.number is not None, "a turn that was not taken"
            said = plain(ask.said) if ask.parent else ""
            turn = PolicyTurn(ask.parent, ask.between, said, sampled, ask.number, ask.images)
            self.tree.add(turn, ask.messages, message, ask.tools)
            if turn is max(self.tree.turns, key=lambda each: each.number):
                self.conversation = [*ask.messages, message]
            self.open.remove(ask)
            self.unsent, self.busy = self.unsent + 1, None
            self.since = self.arrived = time.monotonic()
        if kept := self.world.kept:
            kept.call(self, ask.number, request_seed(ask.seed, ask.max_tokens, *ask.stop), sampled.token_ids)
        ask.answer.set_result((message, turn))

    def settle(self) -> None:
        """Wait until the program asks, or has ended: then end the episode."""
        with self.changed:
            while not (self.ended or self.exited):
                now = time.monotonic()
                wait = self.arrived + SETTLE_S - now if self.open else self.since + self.left - now
                if wait <= 0 and not (self.open and (self._runs(now) or self._more_arrived())):
                    break
                self.changed.wait(max(wait, SETTLE_S))
            if self.ended or (self.open and not self.exited):
                return
            if self.ending:  # by the thread of another request
                self.changed.wait_for(lambda: self.ended)
                return
            self.ending = True
            self._tick()
        self._end()

    def _runs(self, now: float) -> bool:
        """Whether the program computes, or is about to get an answer: another sub-agent may be about to ask, and
        belongs to the same wave."""
        before, (self.seen, computed) = self.seen, activity(self.process.pid) if self.process else ("", 0.0)
        passed, self.computed = computed - self.computed if self.seen is None else SETTLE_S, computed
        self.busy = 0.0 if self.busy is None else self.busy + passed
        if self.busy > LONGEST_SETTLE_S or (not self.unsent and before == self.seen is not None):
            return False
        self.arrived = now
        return True

    def _more_arrived(self) -> bool:
        """On a busy machine another sub-agent's request may wait to be read. The lock is let go meanwhile."""
        count = len(self.open)
        self.changed.release()
        self.world.endpoint.read_all()
        self.changed.acquire()
        return len(self.open) != count

    def sent(self, count: int) -> None:
        """Called when the answer to `count` requests for turns has been sent."""
        with self.changed:
            self.unsent -= count

    def _tick(self) -> None:
        """Count the time since the program waits no more for the policy."""
        if not self.open:
            now = time.monotonic()
            self.left, self.since = self.left - (now - self.since), now

    # ---- the end

    def _end(self) -> None:
        late = not self.exited
        self.close()
        try:
            if late:
                raise EpisodeFailed(f"took longer than {self.world.options.episode_timeout_s:g} s (episode_timeout_s)")
            self._finish(self.process.returncode if self.process else 0)
        except BaseException as error:
            self._fail(str(error))
            if not isinstance(error, EpisodeFailed):  # the score's code can never be right
                raise
        finally:
            remove_folder(str(self.folder))
            with self.changed:
                self.changed.notify_all()

    def _finish(self, status: int) -> None:
        if not self.tree.turns:
            raise EpisodeFailed(f"ended with status {status} before the policy had a turn: {self._tail()}")
        if kept := self.world.kept:
            kept.finish(self)
        score = None
        if self.grader is not None:
            score = self.grader.submit(self._graded, status).result()
        elif status and not self.refused:
            raise EpisodeFailed(f"ended with status {status}: {self._tail()}")
        response, images = self.tree.response(self.request.prompt_ids), -1 if self._problem.images else None
        if any(self.tree.images):
            images = keep(self.world.album, response.weight_version, self.tree.images)
        self.response = replace(response, score=score, images=images)

    def _graded(self, status: int) -> Score | None:
        """In the thread of the grader's process."""
        assert self.grader is not None, "an episode without a grader"
        self.grader.process.timeout_s = max(self.left, 0.01)
        seed, folder = request_seed(self.request.seed, self.sample, "score"), str(self.folder / "work")
        about = {"prompt": shown(self._problem), "seed": seed, "folder": folder, "status": status}
        score = self.grader.ask("grade", **about, conversation=self.conversation)
        return score and Score(**score)

    def _tail(self) -> str:
        with contextlib.suppress(OSError), (self.folder / "log").open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - LOG_TAIL, 0))  # it may be larger than the memory
            return log.read().decode(errors="replace").strip() or "it printed nothing"
        return "it has no output"

    def _fail(self, why: str) -> None:
        where = f"program {self.world.options.name}, problem {self._problem.index}, turn {len(self.tree.turns)}"
        response = self.tree.response(self.request.prompt_ids) if self.tree.turns else self.response
        self.close()
        self.response = replace(response, finish_reason="abort", score=Score(0.0, error=f"{where}: {why}"))

    def close(self) -> None:
        """Close the endpoint, then kill the program and all that it started. May be called twice."""
        with self.changed:
            self.closed, asks, self.open = True, self.open, []
        self.world.endpoint.close_episode(self)
        for ask in asks:
            ask.answer.set_exception(Refused(410, "the episode has ended", "episode_ended"))
        if self.process is not None:
            end_reaper(self.process)
        self._left()
