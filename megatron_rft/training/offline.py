"""Offline training on a store of trajectories, with any method of objectives/offline.

Every rank holds all trajectories (token ids and a few numbers each) and draws the same examples. Validation uses
data.validation, or the store's held-out problems; the run exports the model with the best validation.
"""

import math
from contextlib import ExitStack, closing
from functools import partial

import torch

from megatron_rft import objectives
from megatron_rft.config import Recipe
from megatron_rft.conversion import fingerprint
from megatron_rft.data import trajectories as store
from megatron_rft.data.stream import Stream
from megatron_rft.data.trajectories import Stored
from megatron_rft.megatron.balance import Costs
from megatron_rft.objectives.offline.base import part_of
from megatron_rft.records import Batch, Prompt
from megatron_rft.training import build, loop
from megatron_rft.training.grad_norms import GradientNorms
from megatron_rft.training.offline_reference import OfflineModels, Reference, ReferenceSource
from megatron_rft.training.run import Run
from megatron_rft.training.stored import StoredBatches, build_evaluator
from megatron_rft.utils.errors import DataError


def train(recipe: Recipe) -> int:
    """Train until run.steps, run.epochs, evaluation.patience or a signal. Returns the exit status."""
    tokenizer, hf_config = build.load_model_files(recipe.model)
    path = recipe.data.train.path
    stored = store.read(path)
    own = {} if recipe.data.validation else {"validation": stored.held_out}
    held_out = stored.held_out if own and recipe.evaluation.every else None
    check_store(stored, path, fingerprint.of_tokenizer(build.tokenizer_folder(recipe.model)), held_out)
    options, objective = recipe.algorithm, objectives.build(recipe.algorithm)
    data = objective.annotate(stored.train)
    examples = objective.examples(data)
    cost = Costs(data, not recipe.batching.why_not_shared(recipe.megatron.context_parallel_size))
    check_examples(cost, examples, options.name, path, recipe.batching.micro_batch_tokens)
    source = ReferenceSource.of(recipe, stored.digest)
    source.check_cache()
    stream, size = Stream(examples, recipe.run.seed, recipe.data.shuffle), options.batch_sequences
    size = size // 2 if options.pairs else size
    steps = recipe.run.steps or math.ceil(recipe.run.epochs * len(examples) / size)
    actor = build.build_actor(recipe, hf_config, steps)
    reference = Reference(source, actor, data)
    models = OfflineModels(actor, objective.needs, gradient_norms(options.part_norms_every), reference)
    with ExitStack() as stack:
        evaluator, weights = build_evaluator(recipe, hf_config, tokenizer, models, stack, **own)
        run = stack.enter_context(closing(Run(recipe, models, stream, steps, evaluator)))
        batches = StoredBatches(stream, size, partial(draw, reference.data(data)), weights, run.phases)
        return loop.train(run, batches, models, objective)


def check_store(stored: Stored, path: str, tokenizer: str, held_out: list[Prompt] | None) -> None:
    """Check that the trajectories are of this tokenizer (by fingerprint), and that there are held-out problems if the
    run evaluates on them (None: it does not)."""
    if stored.index["facts"]["tokenizer_fingerprint"] != tokenizer:
        raise DataError(
            f"data.train: the trajectories in {path} are tokens of another tokenizer, that of "
            f"{stored.index['facts']['model']}. Set model.tokenizer to it, or generate trajectories with this one"
        )
    if held_out is not None and not held_out:
        raise DataError(
            f"evaluation.every: the store {path} holds no problems out for validation (generation.held_out). Set "
            "evaluation.every to 0, give data.validation, or generate with a larger share"
        )


def check_examples(cost: Costs, examples: list[tuple[int, ...]], method: str, path: str, token_budget: int) -> None:
    """Check that there are examples and that each fits a micro-batch, because an example is not split."""
    if not examples:
        raise DataError(f"algorithm.name: {method} finds nothing to learn from in {path}")
    longest = max(cost(list(example)) for example in examples)
    if longest > token_budget:
        what = "pair" if len(examples[0]) == 2 else "trajectory"
        raise DataError(
            f"batching.micro_batch_tokens: the longest {what} has {longest} tokens, and does not fit {token_budget}"
        )


def draw(data: Batch, examples: list[tuple[int, ...]]) -> Batch:
    """The trajectories of the drawn examples. Those of one example form a unit."""
    index = torch.tensor([position for example in examples for position in example])
    unit = torch.tensor([number for number, example in enumerate(examples) for _ in example])
    return data.select(index).with_sequences(unit=unit)


def gradient_norms(every: int) -> GradientNorms:
    """Gradient norms of right and of wrong trajectories (fpa.txt, figure 8)."""
    names = ("correct", "incorrect")
    return GradientNorms(every, "dynamics/grad_norm_", names, part_of, wanted=lambda update: True)
