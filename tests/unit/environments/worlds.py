"""Environments for tests; their processes import this file."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np

from megatron_rft.environments import Environment, Prompt, Score, Turn


class Echo(Environment):
    """Says how long the text was, up to `prompt.fields["rounds"]` times; faults when `prompt.fields` says so."""

    def reset(self, prompt: Prompt, seed: int) -> str | None:
        self.fields, self.heard, self.seed = prompt.fields, [], seed
        if prompt.fields.get("fault_at") == 0:
            self.fault(prompt.fields["fault"])
        return prompt.fields.get("opening")

    def step(self, text: str) -> Turn:
        self.heard.append(text)
        if self.fields.get("fault_at") == len(self.heard):
            return self.fault(self.fields["fault"])
        done = len(self.heard) == self.fields.get("rounds", 99)
        return Turn("CD"[len(text) % 2], reward=self.fields.get("reward", 0.0), done=done)

    def fault(self, what: str) -> Turn:
        match what:
            case "raises":
                raise LookupError("no such place")
            case "exits":
                raise SystemExit(3)
            case "late":
                time.sleep(60)
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "closes":
                os.closerange(3, 64)
                time.sleep(60)
            case "long":
                return Turn("x" * 10_000_000)
            case "interrupts":
                raise KeyboardInterrupt
            case "bytes":
                return Turn(b"no text")
            case "none":
                return Turn(None)
            case "no role":
                return Turn([{"content": "A"}])
            case "parts":
                return Turn([{"role": "user", "content": [{"type": "audio", "audio": "A"}]}])
            case "no JSON":
                return Turn([{"role": "user", "content": "A", "seen": {1, 2}}])
            case "surrogate":
                return Turn("\ud800 x")
            case "nan":
                return Turn("A", reward=float("nan"))
            case "words":
                return Turn("A", reward="1.0")
            case "no turn":
                return "A"
            case "tuple":
                return "A", 1.0, True

    def score(self) -> Score | None:
        if self.fields.get("fault_at") == "score":
            return self.fault(self.fields["fault"])
        return Score(0.5, reason=f"{len(self.heard)} turns") if self.fields.get("scores") else None


class Fickle(Echo):
    """Answers by the time of day."""

    def step(self, text: str) -> Turn:
        now = time.time_ns()
        return Turn("".join("CDEFGH"[now // 6**place % 6] for place in range(3)), done=super().step(text).done)


class Replaced(Echo):
    """Answers otherwise once a process has died."""

    def step(self, text: str) -> Turn:
        died = Path(self.fields["died"])
        if self.fields.get("fault_at") == len(self.heard) + 1:
            died.touch()
        return Turn("DDD" if died.exists() else "CCC", done=super().step(text).done)


class Random(Echo):
    """Answers by the global generator, which gets a seed before each call."""

    def step(self, text: str) -> Turn:
        return Turn(random.choice("CDEFGH"))


class Numpy(Echo):
    """Answers with numpy's numbers."""

    def step(self, text: str) -> Turn:
        return Turn("C", reward=np.float32(1.0), done=np.bool_(True))

    def score(self) -> np.float32:
        return np.float32(0.5)


class Fails(Echo):
    """Cannot answer."""

    def step(self, text: str) -> Turn:
        raise NotImplementedError
