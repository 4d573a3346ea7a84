"""Sampling ahead: while a batch trains, the next ones are being generated (`rollout.staleness` n).

With W(v) the weights after v steps, step t trains on batch t and makes W(t) of W(t-1). Batch t is begun when step t - n
begins:

    n = 0   batch t is sampled from W(t-1), and nothing else happens meanwhile: on-policy.
    n = 1   batch t is sampled from W(t-2), whole, while step t-1 trains. The engine gets new weights between two
            batches. What a batch is depends on no clock, so such a run is as reproducible as one with n = 0.
    n > 1   n batches are under way, and the engine gets new weights in the middle of them: what is being written goes
            on with the new ones. Batch t begins under W(t-1-n), and ends under whatever is the newest then. Which
            token is the first of new weights depends on the clock.

The bound holds by construction: no response of batch t is begun with weights older than W(t-1-n). A checkpoint holds
the batches that are under way, whole: it waits for them. With n = 1 there is nothing to wait for.
"""

import json
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megatron_rft.records import Prompt, Response, Score
from megatron_rft.rollout.refiner import Refined
from megatron_rft.rollout.sampler import Keep, PendingRound, Rollout, RoundResult, Sampled, Sampler, conclude
from megatron_rft.utils.errors import RunFailed

KEY = "ahead"  # in a checkpoint's state


@dataclass
class Pending:
    """A batch that is under way (`rounds` is None) or ready."""

    step: int
    begun: PendingRound | None
    rounds: list[RoundResult] | None = None


class Weights(Protocol):
    """The policy's weights in the engine (training/engines.py)."""

    version: int

    def sleep(self) -> None:
        """The engine gives its device memory to the trainer until the next push."""
        ...

    def push(self, version: int, verify: bool = False) -> dict[str, float]:
        """Collective. What the actor has now, as `version`; metrics of the sync."""
        ...


class RolloutScheduler:
    """Batches of rollouts, and new weights for the engine between them, in the one order that is right:

    `next(step)` begins what may be begun, collects the batch of `step`, and puts the engine to sleep.
    `publish(version)` waits for what must end before the engine gets new weights, and pushes them.

    `draw(n)` gives the next n prompts; `count`, `keep` and `max_rounds` are those of `Sampler.sample`.
    """

    def __init__(
        self,
        sampler: Sampler,
        weights: Weights,
        draw: Callable[[int], list[Prompt]],
        count: int,
        last_step: int,
        staleness: int = 0,
        keep: Keep | None = None,
        max_rounds: int = 1,
        phases: Callable[[str], AbstractContextManager] = nullcontext,
    ):
        self.sampler, self.weights, self.draw, self.count = sampler, weights, draw, count
        self.last_step, self.staleness, self.keep, self.max_rounds = last_step, staleness, keep, max_rounds
        self.phases = phases
        self.pending: deque[Pending] = deque()

    def next(self, step: int) -> Sampled:
        """The batch of `step`. Those up to step + n are under way from now on."""
        with self.phases("generation"):
            sampled = self._next(step)
        self.weights.sleep()
        return sampled

    def publish(self, version: int, drain: bool = False, verify: bool = False) -> dict[str, float]:
        """The actor's weights into the engine, as those after step `version`. `drain`: nothing may be under way
        afterwards, since the engine is wanted for something else. `verify`: compare them bit by bit. Metrics."""
        self.weights.version = version  # an engine that is lost while others drain gets the actor's present weights
        with self.phases("generation"):
            self.drain(everything=drain)
        with self.phases("sync"):
            return self.weights.push(version, verify)

    def drain(self, everything: bool = False) -> None:
        """Collect the batches under way. With n > 1 they may go on over a sync, unless `everything` must end."""
        if self.staleness <= 1 or everything:
            for batch in self.pending:
                self._collected(batch)

    def close(self) -> None:
        self.sampler.close()

    def _next(self, step: int) -> Sampled:
        newest = self.pending[-1].step if self.pending else step - 1
        for number in range(newest + 1, min(step + self.staleness, self.last_step) + 1):
            self.pending.append(Pending(number, self.sampler.begin(self.draw(self.count), number, self.keep)))
        batch = self.pending.popleft()
        assert batch.step == step, f"batch {batch.step} at step {step}"
        sampled = conclude(self._collected(batch), self.count, step, self.keep)
        if (stale := int(sampled.metrics["rollout/staleness"])) > self.staleness:
            raise RunFailed(
                f"step {step}: a response was begun {stale} versions of the weights ago, and rollout.staleness is "
                f"{self.staleness}: the engine does not have the weights that it was sent"
            )
        return sampled

    def _collected(self, batch: Pending) -> list[RoundResult]:
        if batch.rounds is None:
            batch.rounds = self.sampler.collect(batch.begun, self.draw, self.count, self.keep, self.max_rounds)
            batch.begun = None
        return batch.rounds

    # ---- checkpoints

    def state(self) -> dict[str, Tensor]:
        """The batches that are under way. Waits for them."""
        self.drain(everything=True)
        if not self.pending:
            return {}
        rows = [{"step": each.step, "rounds": [_to_json(result) for result in each.rounds]} for each in self.pending]
        return {KEY: torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)}

    def restore(self, state: dict[str, Tensor], prompts: list[Prompt]) -> dict[str, Tensor]:
        """Takes what `state` put into a checkpoint, and returns the rest of it."""
        if KEY in state:
            by_index = {prompt.index: prompt for prompt in prompts}
            for row in json.loads(bytes(state[KEY].numpy())):
                rounds = [_from_json(result, by_index) for result in row["rounds"]]
                self.pending.append(Pending(row["step"], None, rounds))
        return {name: value for name, value in state.items() if name != KEY}


def _to_json(result: RoundResult) -> dict:
    rollouts = [asdict(replace(rollout, prompt=rollout.prompt.index)) for rollout in result.rollouts]
    return vars(result) | {"rollouts": rollouts}


def _from_json(row: dict, prompts: dict[int, Prompt]) -> RoundResult:
    return RoundResult(**row | {"rollouts": [_rollout(each, prompts) for each in row["rollouts"]]})


def _rollout(row: dict, prompts: dict[int, Prompt]) -> Rollout:
    response = {k: tuple(v) if isinstance(v, list) else v for k, v in row["response"].items()}
    context = row["context"] if row["context"] is None else tuple(row["context"])
    typed = {"prompt": prompts[row["prompt"]], "response": Response(**response), "score": Score(**row["score"])}
    return Rollout(**row | typed | {"context": context, "refined": _refined(row["refined"])})


def _refined(row: dict | None) -> Refined | None:
    if row is None:
        return None
    return Refined(**row | {"token_ids": tuple(row["token_ids"]), "score": Score(**row["score"])})
