"""Runs one rank's step: models, log-probs, updates, the stream of weights.

python -m megatron_rft.rehearsal.rank

Each line of stdin is a `RankQuestion` as JSON. The process imports the packages once and forks for each question. The
fork writes the counts as a line of JSON to stdout; the line is empty if it fails. What libraries print goes to stderr.
"""

import importlib
import json
import math
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

from megatron_rft.config import load
from megatron_rft.families.checks import whole_sequences
from megatron_rft.plan.devices import NODE, Efficiency, device
from megatron_rft.plan.model_shape import find_model, read_shape
from megatron_rft.rehearsal import guard
from megatron_rft.rehearsal.ledger import Ledger
from megatron_rft.utils.errors import UserError

ROWS = 1 << 12  # of a batch, at most
UPDATES = {"policy": "training", "value": "critic's training"}  # name of an update -> name of its phase


@dataclass(frozen=True)
class RankQuestion:
    recipe: str
    overrides: list[str]
    world: int
    device: str
    fraction: float = 0.5  # mean length of a response, as a share of the longest
    node: int = NODE
    training_only: bool = False  # loading and the updates
    rank: int = 0
    micro_batches: int = 2


def main() -> None:
    prepared = None
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        question = RankQuestion(**json.loads(line))
        prepared = prepared or prepare(question)
        child = os.fork()
        if child == 0:
            print(json.dumps(answer(question, *prepared)), file=answers)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(file=answers)


def prepare(question: RankQuestion) -> tuple[Ledger, Any]:
    """Let this process pretend to have the question's GPUs, and import everything, once for all ranks. Returns the
    ledger and the device mode."""
    ledger = Ledger(device(question.device), Efficiency(), question.node)
    guard.load()
    from megatron_rft.rehearsal import cuda
    from megatron_rft.rehearsal.device import FakeDevice

    mode = FakeDevice(ledger)  # before the patches: it imports torch's compiler, which lists functions
    cuda.install(ledger)
    for module in ("rehearsal.patches", "training.online"):
        importlib.import_module(f"megatron_rft.{module}")
    return ledger, mode


def answer(question: RankQuestion, ledger: Ledger, mode: Any) -> dict[str, Any]:
    """Return the counts of a rank, or its error. Call it once in a process: it patches torch for good."""
    from megatron_rft.rehearsal import patches

    assert device(question.device) == ledger.device, question.device
    began = time.time()
    try:
        step = Step(question, ledger, mode)
        step.join()
        patches.install(ledger, mode, question.training_only)
        with mode:
            times = step.run()
    except UserError as error:
        return {"error": str(error)}
    return counts(ledger, times) | {"seconds": time.time() - began, "rss": resource.getrusage(0).ru_maxrss << 10}


class Step:
    """A step of the recipe's trainer. `times` relates each phase to a whole step: (passes in a step, micro-batches of a
    pass in the run / micro-batches rehearsed)."""

    def __init__(self, question: RankQuestion, ledger: Ledger, mode: Any):
        from megatron_rft.conversion import load_config

        self.question, self.ledger, self.mode = question, ledger, mode
        self.recipe = load(question.recipe, question.overrides)
        self._name_folders()
        self.hf_config = load_config(find_model(self.recipe.model.path))
        self.times: dict[str, tuple[float, float]] = {}

    def _name_folders(self) -> None:
        """Name the folders of the recipe's models; one that is not on this machine has the shapes of the policy's."""
        model, critic = self.recipe.model, self.recipe.critic
        own = find_model(model.path)

        def folder(path: str | None, option: str) -> str | None:
            return path and str(find_model(path, option) or own)

        changed = {"path": str(own), "reference": folder(model.reference, "model.reference")}
        sections = {"model": model.model_copy(update=changed)}
        if critic:
            sections["critic"] = critic.model_copy(update={"path": folder(critic.path, "critic.path")})
        self.recipe = self.recipe.model_copy(update=sections)

    def join(self) -> None:
        """Create the process groups of the whole world as this rank sees them."""
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        from megatron_rft.megatron import parallel

        dist.init_process_group("fake", rank=self.question.rank, world_size=self.question.world, store=FakeStore())
        parallel.initialize(self.recipe.megatron)

    def run(self) -> dict[str, tuple[float, float]]:
        from megatron_rft.training.engines import DTYPES

        models = self._online() if self.recipe.trainer == "rl" else self._stored()
        if self.question.training_only:
            return self.times
        if self.recipe.rollout.offload_trainer:  # record the device's memory beside an engine that is awake
            for actor in models.trained.values():
                actor.training_state.offload()
            with self.ledger.during("generation"):
                pass
            for actor in models.trained.values():
                actor.training_state.restore()
        with self.ledger.during("weights to the engine"), self.ledger.holding("buckets"):
            dtype = DTYPES[self.recipe.rollout.dtype or self.recipe.model.precision]
            deque(models.actor.stream(dtype=dtype), maxlen=0)
        return self.times

    # ---- trainers

    def _online(self) -> Any:
        from megatron_rft.rehearsal import batches
        from megatron_rft.training.build import Networks
        from megatron_rft.training.online import build_objective

        recipe = self.recipe
        objective = build_objective(recipe.algorithm, recipe.setting, recipe.plugins)
        models = self._built(lambda: Networks(self.hf_config, recipe).online(objective, self._teachers()))
        whole = recipe.rollout.prompts_per_step * recipe.rollout.group_size
        each = whole // recipe.setting.mini_batches
        batch = self._batch(recipe.rollout.group_size, each)
        ratio = whole / len(batch)
        if recipe.algorithm.uses_feedback:
            batch = batches.with_contexts(batch, recipe.algorithm.max_feedback_tokens // 2)
        if recipe.refines:
            batch = batches.with_refined(batch)
        batch = batches.with_different_logprobs(models.outputs(batch))
        for phase in ("log-probs", "log-probs of another model", "critic's values"):
            self.times[phase] = (1, ratio)
        # before PIPO verifies (its window is full) and PPO trains the policy (its critic is warm)
        steps = (recipe.pipo.window if recipe.pipo else 0) + (recipe.critic.warmup_steps if recipe.critic else 0)
        for update in updates_of(objective, batch, steps).values():
            if self.question.training_only and update.name not in UPDATES:
                continue  # PIPO's verification needs the memory of the policy's update
            passes = update.epochs * update.mini_batches
            self._update(models, update, passes, whole / passes * update.epochs)
        with self.ledger.during("end of the step"):
            models.end_of_step()
        return models

    def _stored(self) -> Any:
        from megatron_rft import objectives
        from megatron_rft.training import build
        from megatron_rft.training.models import Models
        from megatron_rft.training.teacher import Teachers

        recipe, objective = self.recipe, objectives.build(self.recipe.algorithm)

        def new() -> Models:
            networks = build.Networks(self.hf_config, recipe)
            actor = networks.actor(1000, recipe.rollout.temperature)
            shared = actor, recipe.megatron, recipe.model.precision
            given = recipe.teaching and Teachers(recipe.teaching, self._teachers(), *shared)
            return Models(actor, objective.needs, given=given)

        models = self._built(new)
        offline, count = recipe.trainer == "offline", recipe.algorithm.batch_sequences
        batch = self._batch(2 if offline else 1, count)
        if offline:
            batch = self._with_reference(models, objective, batch)
        for update in objective.prepare(batch, objective.init()).updates:
            self._update(models, update, 1, count)
        if models.given or not recipe.algorithm.compares_distributions:
            models.reference = None  # a run keeps only one that its updates compare with
        return models

    def _with_reference(self, models: Any, objective: Any, batch: Any) -> Any:
        """Return pairs of a right and a wrong response with log-probs of the models, which get a reference."""
        import torch

        number, options = torch.arange(len(batch)), self.recipe.algorithm
        rewards = torch.where(number % 2 == 0, 1.0, -1.0)
        batch = batch.with_sequences(rewards=rewards, unit=number // 2 if options.pairs else number)
        models.reference = models.actor.snapshot()
        if getattr(options, "reference", None) == "cached_hidden":
            models.given = SimpleNamespace(second=partial(self._cached, models.actor))
        batch = batch.with_tokens(ref_logprobs=models.reference_logprobs(batch))
        return models.outputs(objective.annotate(batch))

    def _cached(self, actor: Any, batch: Any, other: Any) -> Any:
        """Return the reference's distribution from cached hidden states."""
        from megatron_rft.megatron import model, parallel
        from megatron_rft.megatron.two_distributions import Second

        output = None
        if parallel.is_last_stage():
            with self.ledger.holding("other weights"):
                output = model.output_weight(actor.models[-1]).detach().clone()
        return Second(batch, extrapolation=other.extrapolation, rows=self._cached_rows, output_weight=output)

    # ---- parts

    def _teachers(self) -> dict[int, str]:
        """Return the teacher of each row, in turn, if there are several."""
        names = self.recipe.teaching.teachers if self.recipe.data.teacher_field else ()
        return dict(zip(range(ROWS), cycle(names), strict=False))

    def _built(self, make: Callable[[], Any]) -> Any:
        """Build models and load them (loading.py)."""
        import torch

        with self.ledger.during("start"), self.ledger.holding("optimizer"):
            models = make()
            for actor in models.trained.values():
                actor.optimizer.fill_in()
        if self.recipe.data.image_field:  # images without values
            grid, c = self._grid(), self.hf_config.vision_config
            pixels = torch.empty(math.prod(grid), 3 * c.temporal_patch_size * c.patch_size**2)
            models.see(SimpleNamespace(grids=lambda _: [grid], pixels=lambda _: pixels))
        return models

    def _grid(self) -> tuple[int, int, int]:
        """Return the patches of the image in each prompt."""
        tower = read_shape(find_model(self.recipe.model.path)).tower
        return tower.grid(self.recipe.data, max(self.recipe.data.max_prompt_tokens // 2, 1))

    def _batch(self, group: int, most: int) -> Any:
        """Return micro-batches for every data-parallel rank, with at most as many sequences as the run has."""
        from megatron_rft.megatron import parallel
        from megatron_rft.rehearsal.batches import batch_of, micro_batch, with_images

        recipe, question = self.recipe, self.question
        prompt = max(recipe.data.max_prompt_tokens // 2, 1)
        budget, longest = recipe.batching.micro_batch_tokens, recipe.rollout.max_response_tokens
        why = recipe.batching.why_not_shared(recipe.megatron.context_parallel_size, whole_sequences(self.hf_config))
        sharing = 1 if why else group
        shape = micro_batch(prompt, min(longest, budget - prompt), question.fraction, budget, sharing)
        count = question.micro_batches * parallel.dp_size() * len(shape.responses)
        batch = batch_of(shape, max(min(group, 2), min(count, most)), group)
        if not recipe.data.image_field:
            return batch
        cells = math.prod(self._grid()) // self.hf_config.vision_config.spatial_merge_size**2
        return with_images(batch, self.hf_config.image_token_id, cells)

    def _update(self, models: Any, update: Any, passes: float, sequences: float) -> None:
        """Make one optimizer step. The run makes `passes` of them, each on `sequences`."""
        phase = UPDATES.get(update.name, update.name)
        update = replace(update, mini_batches=1, epochs=1)
        mini_batch = next(update.steps())
        with self.ledger.during(phase):
            models.step(update, *update.computed(mini_batch), models.second(update, mini_batch))
        self.times[phase] = (passes, max(1.0, sequences / len(mini_batch)))
        if update.second is not None:
            self.times["second distribution"] = self.times[phase]

    def _cached_rows(self, numbers: Any) -> Any:
        import torch

        dtype = torch.float32 if self.recipe.model.precision == "fp32" else torch.bfloat16
        with self.mode.fake:
            return torch.empty(len(numbers), self.hf_config.hidden_size, dtype=dtype)


def updates_of(objective: Any, batch: Any, steps_before: int) -> dict[str, Any]:
    """Return the updates of a step in the middle of a run, by name. Earlier steps use a small part of the batch."""
    small, state = batch.select(batch.groups < 2), objective.init()
    for number in range(steps_before):
        state = objective.prepare(small.with_scalars(sampled_reward_sum=1.0 + number), state).state
    for _ in range(2):  # the second one verifies the first
        prepared = objective.prepare(batch, state)
        state = prepared.state
    return {update.name: update for update in prepared.updates}


def counts(ledger: Ledger, times: dict[str, tuple[float, float]]) -> dict[str, Any]:
    return {
        "device": asdict(ledger.device),
        "times": times,
        "peaks": {phase: {"total": total, "parts": parts} for phase, (total, parts) in ledger.memory.peaks.items()},
        "host": {phase: total for phase, (total, _) in ledger.host.peaks.items()},
        "kernels": [[*key, *values] for key, values in ledger.kernels.items()],
        "links": [[*key, *values] for key, values in ledger.links.items()],
        "uploads": ledger.uploads,
        "waits": [[*key, count] for key, count in ledger.waits.items()],
        "micro_batches": dict(ledger.micro_batches),
        "tokens": dict(ledger.tokens),
        "largest": dict(ledger.largest),
    }


if __name__ == "__main__":
    main()
