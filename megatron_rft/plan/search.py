"""Ranks the layouts of a recipe that fit its GPUs by the predicted seconds of a training step. No torch."""

import math
from dataclasses import dataclass, replace

from megatron_rft.config.recipe import Recipe
from megatron_rft.plan import memory, model_shape
from megatron_rft.plan.devices import NODE, Efficiency, device
from megatron_rft.plan.layout import Layout, possible, problems
from megatron_rft.plan.seconds import Bounds, Machine
from megatron_rft.plan.shared_prompts import SharedGroup
from megatron_rft.utils.errors import ConfigError

SHOWN = 12
LONGEST_CONTEXT, LONGEST_PIPELINE = 8, 16


@dataclass(frozen=True)
class Candidate:
    layout: Layout
    memory: int
    seconds: Bounds


class Search:
    """Searches the layouts of one recipe. `layout`: the recipe's own. `device_gib`: memory of each GPU. `fraction`:
    mean length of prompts and responses, as a share of the longest."""

    def __init__(self, recipe: Recipe, layout: Layout, device_gib: float | None, name: str, fraction: float = 0.5):
        self.recipe, self.own, self.chip, self.fraction = recipe, layout, device(name), fraction
        if device_gib is None:
            raise ConfigError("--search needs --gpu-gib, the memory of one GPU: layouts that do not fit are left out")
        self.bytes, self.s = device_gib * memory.GIB, model_shape.find_shape(recipe.model.path, loads=False)
        if self.s is None:
            raise ConfigError(f"--search needs config.json of the model: hf download {recipe.model.path} config.json")

    def candidates(self) -> list[Candidate]:
        """Return the layouts that fit and the recipe's own, the fastest first."""
        found = [self._candidate(layout) for layout in self._layouts()]
        fitting = [each for each in found if each.memory <= self.bytes or each.layout == self.own]
        return sorted(fitting, key=lambda each: each.seconds.most)

    def _layouts(self) -> list[Layout]:
        """Return layouts with tensor parallelism inside a node and limited contexts and pipelines. The matrices of an
        expert are split over as many ranks as the other matrices, or not at all."""
        layouts = {self.own: None}
        for layout in possible(self.own.world, self.s):
            if layout.tp > NODE or layout.cp > LONGEST_CONTEXT or layout.pp > LONGEST_PIPELINE:
                continue
            layouts[layout] = None
            if self.s.experts and layout.tp > 1 and not list(problems(whole := replace(layout, etp=1), self.s)):
                layouts[whole] = None
        return list(layouts)

    def _candidate(self, layout: Layout) -> Candidate:
        sequence = self.recipe.megatron.sequence_parallel if layout == self.own else layout.tp > 1
        section = self.recipe.megatron.model_copy(update={"sequence_parallel": sequence})
        recipe = self.recipe.model_copy(update={"megatron": section})
        m = memory.MemoryPlan(recipe, self.s, layout, self.bytes)
        group = SharedGroup.of(recipe, self.s, layout, self.fraction)
        chip = replace(self.chip, flops=(2 if recipe.model.precision == "fp8" else 1) * self.chip.flops)
        recompute, element = section.recompute_granularity, memory.BYTES[recipe.model.precision]
        machine = Machine(chip, Efficiency(), self.s, layout, sequence, recompute, element, keys=group.keys)
        return Candidate(layout, m.largest, self._step(machine, group, m.state))

    def _step(self, machine: Machine, group: SharedGroup, state: memory.State) -> Bounds:
        """Return the time of a step's log-probs and updates, without generation and grading."""
        r, batching = self.recipe, self.recipe.batching
        length = min(group.length, batching.micro_batch_tokens)
        online = r.trainer == "rl"
        if online:
            prompts, epochs = r.rollout.prompts_per_step, r.algorithm.epochs
            sequences, updates = prompts * r.rollout.group_size, r.algorithm.mini_batches(prompts)
        else:
            sequences, updates, epochs = r.algorithm.batch_sequences, 1, 1
        tokens = sequences / group.count * group.tokens
        train = machine.passes(tokens / updates, batching.micro_batch_tokens, length, True) + machine.update(state)
        total = train * (updates * epochs)
        if r.pipo is not None:
            total += machine.passes(tokens, batching.micro_batch_tokens, length, True) + machine.update(state)
        looks = (online and updates * epochs > 1 or r.pipo is not None) + (online and r.algorithm.uses_reference)
        alone = machine.passes(tokens, batching.tokens_without_backward, length, False)
        total += alone * looks
        if r.data.image_field and (tower := self.s.tower):
            patches = math.prod(tower.grid(r.data, r.data.max_prompt_tokens))
            passes = tower.flops(patches, r.vision) * (epochs + (r.pipo is not None)) + tower.flops(patches) * looks
            shown = sequences / (r.rollout.group_size if online else 1) / machine.layout.dp
            total += Bounds(machine.products(passes * shown), 0)
        return total * (2 if r.critic else 1)

    def table(self) -> list[str]:
        candidates = self.candidates()
        shown = candidates[:SHOWN] + [each for each in candidates[SHOWN:] if each.layout == self.own]
        what = f"seconds of a step on {self.chip.name} without generation, from all links behind kernels to no overlap"
        told = [f"layouts that fit, by {what}:"]
        for candidate in shown:
            over = "" if candidate.memory <= self.bytes else ", which does not fit"
            mark = f"  <- the recipe's{over}" if candidate.layout == self.own else ""
            span = f"{candidate.seconds.least:8.2f} to {candidate.seconds.most:8.2f} s"
            told.append(f"  {span}  {memory.gib(candidate.memory):>10}  {candidate.layout}{mark}")
        if len(candidates) > len(shown):
            told.append(f"  and {len(candidates) - len(shown)} more")
        return told
