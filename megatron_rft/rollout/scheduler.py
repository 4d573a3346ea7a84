"""Samples ahead: while a batch trains, the next ones are generated (`rollout.staleness` n).

W(v) are the weights after v steps; step t trains on batch t and turns W(t-1) into W(t). Sampling of batch t starts when
step t - n starts:

    n = 0   Batch t is sampled from W(t-1) before step t trains: on-policy.
    n = 1   Batch t is sampled from W(t-2) while step t-1 trains. The engine gets new weights between two batches.
            Timing does not change a batch, so such a run is as reproducible as one with n = 0.
    n > 1   n batches are pending, and the engine gets new weights in the middle of them: unfinished responses continue
            with the new weights. Batch t starts with W(t-1-n) and ends with the newest weights. Timing decides which
            token is the first one from new weights.

No response of batch t starts with weights older than W(t-1-n). A checkpoint waits for the pending batches and contains
them.
"""

import json
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace

import torch
from torch import Tensor

from megatron_rft.inference.weight_sync import EngineWeights
from megatron_rft.records import Prompt, Response, Score
from megatron_rft.rollout.refiner import Refined
from megatron_rft.rollout.sampler import Keep, PendingRound, Rollout, RoundResult, Sampled, Sampler, conclude
from megatron_rft.utils.errors import RunFailed

KEY = "ahead"  # key in a checkpoint's state


@dataclass
class Pending:
    """A batch that is being sampled (`rounds` is None) or ready."""

    step: int
    first_round: PendingRound | None
    rounds: list[RoundResult] | None = None


@dataclass
class RolloutScheduler:
    """Orders the sampling of batches and the pushes of new weights.

    `begin(step)` starts the batches that may start, for a trainer that has work to do before it calls `next`.
    `next(step)` starts the rest, collects the batch of `step`, and puts the engine to sleep.
    `publish(version)` waits for the batches that must end before the engine gets new weights, and pushes these.

    `draw(n)` returns the next n prompts; `count`, `keep` and `max_rounds` are those of `Sampler.sample`.
    """

    sampler: Sampler
    weights: EngineWeights
    draw: Callable[[int], list[Prompt]]
    count: int
    last_step: int
    staleness: int = 0
    keep: Keep | None = None
    max_rounds: int = 1
    phases: Callable[[str], AbstractContextManager] = nullcontext
    pending: deque[Pending] = field(default_factory=deque)

    def begin(self, step: int) -> bool:
        """Start the batches up to step + n. Returns whether the trainer is idle until the batch of `step` comes. With
        n > 0 it is not: that batch was started earlier, and the trainer has worked on others since."""
        self.weights.wake()
        newest = self.pending[-1].step if self.pending else step - 1
        for number in range(newest + 1, min(step + self.staleness, self.last_step) + 1):
            self.pending.append(Pending(number, self.sampler.begin(self.draw(self.count), number, self.keep)))
        return self.sampler.background and not self.staleness

    def next(self, step: int) -> Sampled:
        """Return the batch of `step`. Batches up to step + n are pending afterwards."""
        with self.phases("generation"):
            sampled = self._next(step)
        self.weights.sleep()
        return sampled

    def publish(self, version: int, drain: bool = False, verify: bool = False) -> dict[str, float]:
        """Push the actor's weights after step `version` into the engine. Returns metrics of the sync. `drain`: first
        wait for all pending batches, because the engine is needed for something else. `verify`: compare bit by bit."""
        self.weights.version = version  # an engine that is replaced during the drain gets the actor's current weights
        with self.phases("generation"):
            self.drain(everything=drain)
        with self.phases("sync"):
            return self.weights.push(version, verify)

    def drain(self, everything: bool = False) -> None:
        """Wait for the pending batches. With n > 1 they may continue over a sync, so this waits only for
        `everything`."""
        if self.staleness <= 1 or everything:
            for batch in self.pending:
                self._collected(batch)

    def close(self) -> None:
        self.sampler.close()

    def _next(self, step: int) -> Sampled:
        self.begin(step)
        batch = self.pending.popleft()
        assert batch.step == step, f"batch {batch.step} at step {step}"
        sampled = conclude(self._collected(batch), step, self.keep)
        if (stale := int(sampled.metrics["rollout/staleness"])) > self.staleness:
            raise RunFailed(
                f"step {step}: a response started with weights that are {stale} versions old, and rollout.staleness is "
                f"{self.staleness}: the engine does not have the weights that it was sent"
            )
        return sampled

    def _collected(self, batch: Pending) -> list[RoundResult]:
        if batch.rounds is None:
            batch.rounds = self.sampler.collect(batch.first_round, self.draw, self.count, self.keep, self.max_rounds)
            batch.first_round = None
        return batch.rounds

    # ---- checkpoints

    def state(self) -> dict[str, Tensor]:
        """Wait for the pending batches and return them for a checkpoint."""
        self.drain(everything=True)
        self.weights.sleep_to_save()
        if not self.pending:
            return {}
        rows = [{"step": each.step, "rounds": [_to_json(result) for result in each.rounds]} for each in self.pending]
        return {KEY: torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)}

    def restore(self, state: dict[str, Tensor], prompts: list[Prompt]) -> dict[str, Tensor]:
        """Restore the batches that `state` put into a checkpoint. Returns the rest of the checkpoint's state."""
        if KEY in state:
            by_index = {prompt.index: prompt for prompt in prompts}
            for row in json.loads(bytes(state[KEY].numpy())):
                rounds = [_from_json(result, by_index) for result in row["rounds"]]
                self.pending.append(Pending(row["step"], None, rounds))
        return {name: value for name, value in state.items() if name != KEY}


def _to_json(result: RoundResult) -> dict:
    rollouts = [asdict(replace(rollout, prompt=rollout.prompt.index)) for rollout in result.rollouts]
    return {field.name: getattr(result, field.name) for field in fields(result)} | {"rollouts": rollouts}


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
