"""Batches that the policy's engine samples, ahead of training by `rollout.staleness` n.

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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from megatron_rft.data.stream import Stream
from megatron_rft.inference.weight_sync import EngineWeights
from megatron_rft.objectives.base import State, Update
from megatron_rft.objectives.surrogates import mismatch
from megatron_rft.records import Batch, Prompt
from megatron_rft.rollout.sampler import PendingRound, RoundResult, Sampled, Sampler, ScoredResponse
from megatron_rft.tracking.metrics import Sample
from megatron_rft.training.loop import Batches
from megatron_rft.training.run import TrainingRun
from megatron_rft.utils.errors import DataError, RunFailed

KEY = "ahead"  # key in a checkpoint's state
ROUND = TypeAdapter(RoundResult)


@dataclass
class OnlineBatches(Batches):
    """Samples `prompts_per_step` problems of the run's stream for each step. `pairs`: those of a dynamic constraint to
    show."""

    run: TrainingRun
    sampler: Sampler
    weights: EngineWeights
    prompts_per_step: int
    staleness: int = 0
    pairs: Callable[[list[ScoredResponse]], list[Sample]] | None = None
    pending: dict[int, PendingRound | list[RoundResult]] = field(default_factory=dict)  # by step: started, or sampled
    sampled: Sampled | None = None  # of this step
    shown: list[Sample] = field(default_factory=list)  # its pairs
    told_of_grader: bool = False  # that it fails on some responses

    def begin(self, step: int) -> bool:
        """Start the batches up to step + n. With n > 0 the trainer is not idle: the batch of `step` was started
        earlier, and the trainer has worked on others since."""
        self.weights.wake()
        newest = max(self.pending, default=step - 1)
        for number in range(newest + 1, min(step + self.staleness, self.run.total_steps) + 1):
            self.pending[number] = self.sampler.begin(self.run.stream.next(self.prompts_per_step), number)
        return self.sampler.background and not self.staleness

    def next(self, step: int) -> Batch:
        """Collect the batch of `step`, and put the engine to sleep. Batches up to step + n are pending afterwards."""
        with self.run.phases("generation"):
            self.begin(step)
            self._collect(step)
            self.sampled = self.sampler.conclude(self.pending.pop(step), step)
        if (stale := int(self.sampled.metrics["rollout/staleness"])) > self.staleness:
            raise RunFailed(
                f"step {step}: a response started with weights that are {stale} versions old, and rollout.staleness is "
                f"{self.staleness}: the engine does not have the weights that it was sent"
            )
        self.weights.sleep()
        if self.pairs and self.run.tracker.samples_due(step):
            with self.run.phases("logprobs"):
                self.shown = self.pairs(self.sampled.rollouts)
        return self.sampled.batch

    def publish(self, version: int, asked: bool = False, verify: bool = False) -> dict[str, float]:
        """Wait for the batches that must end before the engine gets new weights, and send these."""
        if self.weights.sent(version):
            return {}
        self.weights.version = version  # an engine that is replaced during the drain gets the actor's current weights
        with self.run.phases("generation"):
            self.drain(everything=asked)
        with self.run.phases("sync"):
            return self.weights.send(version, verify)

    def drain(self, everything: bool = False) -> None:
        """Wait for the pending batches. With n > 1 they may continue over a sync, so this waits only for
        `everything`."""
        if self.staleness <= 1 or everything:
            for step in self.pending:
                self._collect(step)

    def _collect(self, step: int) -> None:
        if isinstance(first := self.pending[step], PendingRound):
            self.pending[step] = self.sampler.collect(first, self.run.stream.next, self.prompts_per_step)

    def report(self, step: int, batch: Batch, updates: list[Update]) -> dict[str, float]:
        tracker, sampler, sampled = self.run.tracker, self.sampler, self.sampled
        metrics = sampled.metrics | mismatch_metrics(batch) | {"tokens/trained": float(batch.lengths.sum())}
        metrics |= sampler.engine.statistics()
        for line in sampler.engine.take_news():
            tracker.note(line)
        if sampler.refiner:
            metrics |= {f"refiner_{name}": value for name, value in sampler.refiner.engine.statistics().items()}
        given = batch, updates, sampled.rollouts, sampler.tokenizer, self.run.models.actor.images
        tracker.samples(step, lambda: shown_samples(*given) + self.shown)
        if not self.told_of_grader and metrics["reward/grader_errors"]:
            self.told_of_grader = True
            tracker.note(grader_errors(sampled.rollouts, step))
        if metrics["rollout/kept_groups"] < self.prompts_per_step:
            tracker.note(underfilled_batch(metrics, self.prompts_per_step, step))
        return metrics

    def release(self, step: int, state: State) -> None:
        if routes := self.sampler.routes:
            routes.release(step, [keys for name, keys in state.items() if name.endswith("sequences.route")])

    # ---- checkpoints

    def state(self) -> State:
        """Wait for the pending batches and return them for a checkpoint, with the routes that later steps need."""
        self.drain(everything=True)
        self.weights.sleep_to_save()
        routes = self.sampler.routes.state(self.sampler.gather_on_main) if self.sampler.routes else {}
        if not self.pending:
            return routes
        rows = [{"step": step, "rounds": list(map(_to_json, rounds))} for step, rounds in self.pending.items()]
        words = json.dumps(rows, default=np.ndarray.tolist)
        return routes | {KEY: torch.frombuffer(bytearray(words.encode()), dtype=torch.uint8)}

    def restore(self, state: State) -> State:
        if KEY in state:
            by_index = {prompt.index: prompt for prompt in self.run.stream.items}
            for row in json.loads(bytes(state[KEY].numpy())):
                self.pending[row["step"]] = [_from_json(result, by_index) for result in row["rounds"]]
        if self.sampler.routes:
            state = self.sampler.routes.restore(state, dist.get_rank(), dist.get_world_size())
        return {name: value for name, value in state.items() if name != KEY}

    def close(self) -> None:
        self.sampler.close()


def _to_json(result: RoundResult) -> dict:
    rollouts = [replace(rollout, prompt=rollout.prompt.index) for rollout in result.rollouts]
    digests = {rollout.prompt.index: Stream([rollout.prompt]).digest() for rollout in result.rollouts}
    return asdict(replace(result, rollouts=rollouts)) | {"digests": digests}


def _from_json(row: dict, prompts: dict[int, Prompt]) -> RoundResult:
    for rollout in row["rollouts"]:
        index = rollout["prompt"]
        prompt = rollout["prompt"] = prompts.get(index)
        if not prompt or row["digests"][str(index)] != Stream([prompt]).digest():
            gone = f"data.train: row {index + 1}, whose responses are in the checkpoint, is no longer the same"
            raise DataError(f"{gone}. Restore the data, or start in another run.output_dir")
    return ROUND.validate_python(row)


def underfilled_batch(metrics: dict[str, float], wanted: int, step: int) -> str:
    """The warning for a step whose sampling rounds ended before enough groups had unequal rewards."""
    kept, rounds = int(metrics["rollout/kept_groups"]), int(metrics["rollout/rounds"])
    what = f"the step trains on these {kept}" if kept else "its rewards give no gradient"
    return f"step {step}: {kept} of {wanted} groups have unequal rewards after {rounds} rounds of sampling; {what}"


def grader_errors(rollouts: list[ScoredResponse], step: int) -> str:
    """The note about responses that the grader failed on, which have no reward."""
    failed = [each.score.error for each in rollouts if each.score.error is not None]
    return (
        f"step {step}: the grader failed on {len(failed)} of {len(rollouts)} responses, which are left out "
        f"(reward.max_error_share), first with {failed[0]}. Each step's line counts them (reward/grader_errors)"
    )


def mismatch_metrics(batch: Batch) -> dict[str, float]:
    """Metrics of the train-inference mismatch; none if the trainer's log-probs are not computed before the step."""
    rollout, old = batch.tokens["rollout_logprobs"], batch.tokens.get("old_logprobs")
    return {} if old is None or old is rollout else mismatch(rollout, old, batch.response_mask)


SHOWN_GROUPS = 2  # shown with their best and worst response


def shown_samples(
    batch: Batch, updates: list[Update], rollouts: list[ScoredResponse], tokenizer: Any, seen: Any = None
) -> list[Sample]:
    """Samples from a step's batch with the models' outputs, and its updates. `seen`: the actor's images."""
    batch = with_credit(batch, updates)
    return [as_sample(batch.select(torch.tensor([row])), rollouts, tokenizer, seen) for row in shown_rows(batch)]


def with_credit(batch: Batch, updates: list[Update]) -> Batch:
    """The batch with the objective's values per token, such as advantages, if an update has the same sequences
    (possibly followed by refined ones)."""
    count = len(batch.response_ids)
    for update in updates:
        if update.model == "actor" and torch.equal(update.batch.response_ids[:count], batch.response_ids):
            added = {name: values[:count] for name, values in update.batch.tokens.items() if name != "refined_mask"}
            batch = batch.with_tokens(**added)
    return batch


def shown_rows(batch: Batch) -> list[int]:
    """Rows: the best and the worst response of the first groups with unequal rewards, or the first response of
    others."""
    rewards = batch.sequences["rewards"]
    rows_of = [(batch.groups == group).nonzero().flatten() for group in batch.groups.unique()]
    rows_of.sort(key=lambda rows: bool(rewards[rows].min() == rewards[rows].max()))  # stable: equal rewards come last
    picked: list[int] = []
    for rows in rows_of[:SHOWN_GROUPS]:
        best, worst = rows[rewards[rows].argmax()], rows[rewards[rows].argmin()]
        picked += dict.fromkeys((int(best), int(worst)))
    return picked


def as_sample(one: Batch, rollouts: list[ScoredResponse], tokenizer: Any, seen: Any) -> Sample:
    """The sample of a batch of one sequence, one of `rollouts`."""
    ids, group = one.response_ids.tolist(), int(one.groups[0])
    siblings = (each for each in rollouts if each.prompt_index == group)
    rollout = next(each for each in siblings if np.array_equal(each.response.token_ids, ids))
    turns, own, key = rollout.response.turns, rollout.prompt.images, rollout.response.images
    images = seen.source.of(key) if seen and key is not None and key >= 0 else own  # also those of its turns
    return Sample(
        prompt=rollout.prompt.text if own else tokenizer.decode(one.prompt_ids.tolist()),
        images=images.small() if images else [],
        tokens=token_texts(tokenizer, ids),
        reward=rollout.score.reward,
        values={name: values.tolist() for name, values in one.tokens.items() if name != "response_mask"},
        answer=rollout.prompt.answer,
        reason=rollout.score.reason,
        problem=rollout.prompt.index,
        finished=rollout.response.finish_reason == "stop",
        shaping=rollout.score.shaping,
        turns=[list(turn) for turn in turns] if len(turns) > 1 else [],
        segments=[] if one.segment_of is None else runs(one.segment_of),
    )


def runs(numbers: Tensor) -> list[tuple[int, int, int]]:
    """(first, end, number) of each run of equal numbers; none if all are 0."""
    distinct, counts = numbers.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    rows = zip((ends - counts).tolist(), ends.tolist(), distinct.tolist(), strict=True)
    return list(rows) if numbers.any() else []


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token. A token that ends within a character gets "", and the token that completes it gets the
    character."""
    texts, start = [], 0
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end])
        whole = not text.endswith("\ufffd") or end - start >= 4 or end == len(ids)
        texts.append(text if whole else "")
        start = end if whole else start
    return texts
