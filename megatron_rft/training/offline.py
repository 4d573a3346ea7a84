"""Offline training on a store of trajectories, with any method of objectives/offline.

Every rank holds all trajectories (token ids and a few numbers each) and draws the same examples. Validation uses
data.validation, or the store's held-out problems; the run exports the model with the best validation.
"""

import json
import math
import shutil
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rft import objectives
from megatron_rft.config import Data, Model, Recipe
from megatron_rft.config.algorithms.offline import Offline
from megatron_rft.config.plugins import Teaching
from megatron_rft.config.sections import Run
from megatron_rft.conversion import shard
from megatron_rft.conversion.folder import model_fingerprint, tokenizer_fingerprint
from megatron_rft.conversion.lora import TENSORS
from megatron_rft.data import hidden_states
from megatron_rft.data import trajectories as store
from megatron_rft.data.hub import model_folder
from megatron_rft.data.images import ALBUM, PromptImages
from megatron_rft.data.stream import Stream
from megatron_rft.data.trajectories import Stored
from megatron_rft.families.checks import whole_sequences
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.balance import Costs
from megatron_rft.megatron.two_distributions import Second
from megatron_rft.objectives.base import SecondDistribution
from megatron_rft.records import Batch, Prompt
from megatron_rft.training import adapters, build, loop
from megatron_rft.training.engines import DTYPES
from megatron_rft.training.models import LOGPROBS, Models
from megatron_rft.training.problems import Problems
from megatron_rft.training.run import TrainingRun
from megatron_rft.training.stored import StoredBatches
from megatron_rft.training.teacher import Teachers, by_row, check_images
from megatron_rft.utils.errors import DataError
from megatron_rft.utils.files import digest, replacing

CHUNK_TOKENS = 1 << 16  # response tokens that are computed and written together
LOGPROBS_FILE = "reference_logprobs.safetensors"


class Reference:
    """The frozen reference of offline training: its log-probs of the data, computed once and stored with the run, and
    its full distribution, which a forward KL and FPA need: each step by a forward pass with the reference's weights
    (`recompute`), or from hidden states that are computed and stored once (`cached_hidden`). `data`: its digest.
    `start`: the folder of the adapters that training starts from, if one is given."""

    def __init__(self, model: Model, run: Run, options: Offline, data: str, start: str | None):
        self.model, self.seed, self.weights, self.cache = model, run.seed, None, None
        self.dtype = DTYPES[model.precision]
        self.compares = options.compares_distributions and not isinstance(options, Teaching)
        self.cached = self.compares and options.reference == "cached_hidden"
        self.logprobs_file = Path(run.output_dir) / LOGPROBS_FILE
        reference = model.reference and model_fingerprint(model_folder(model.reference, "model.reference"))
        self.facts = {  # that determine the log-probs and hidden states
            "data": data,
            "model": reference or adapters.base_of(model, run.seed),
            "lora.path": digest(Path(start) / TENSORS)["sha256"] if start and not reference else None,
            "tokenizer": tokenizer_fingerprint(build.tokenizer_folder(model)),
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        self.folder = Path(run.output_dir) / "reference_cache"

    def join(self, actor: Actor, data: Batch) -> Batch:
        """Return the whole data set with the reference's log-probs and each token's index in it. The actor has the
        initial weights."""
        self.actor = actor
        logprobs = _kept_logprobs(self.logprobs_file, self.facts)
        recomputed = self.compares and not self.cached
        if logprobs is None or recomputed:
            self.weights = build.reference_weights(self.model, self.seed, actor)
        if logprobs is None:
            if self.cached:
                self._write_cache(data)
            logprobs = self._logprobs(data)  # this file says that the cache is whole, too
        if self.cached:
            self.cache, self.output = hidden_states.HiddenCache(self.folder), self._output_rows()
        if not recomputed:
            self.weights = None
        return data.with_tokens(ref_logprobs=logprobs, data_index=torch.arange(len(data.response_ids)))

    def second(self, batch: Batch, other: SecondDistribution) -> Second:
        """The reference's distribution over the response tokens of `batch`."""
        second, index = Second(batch, self.weights, other.extrapolation), batch.tokens["data_index"]
        if self.cache is None:
            return second
        return replace(second, rows=lambda tokens: self.cache.rows(index[tokens]), output_weight=self.output)

    def _logprobs(self, data: Batch) -> Tensor:
        with self.actor.use_weights(self.weights):
            parts = [self.actor.outputs(data.select(chunk), LOGPROBS)["logprobs"] for chunk in chunks(data)]
        logprobs = torch.cat(parts)
        if dist.get_rank() == 0:
            with replacing(self.logprobs_file) as new:
                save_file({"logprobs": logprobs}, new, metadata={"facts": json.dumps(self.facts)})
        return logprobs

    def _write_cache(self, data: Batch) -> None:
        """Collective. One rank of the last pipeline stage writes."""
        writes = parallel.is_last_stage() and parallel.tp_rank() == parallel.cp_rank() == parallel.dp_rank() == 0
        if writes:
            shutil.rmtree(self.folder, ignore_errors=True)  # what a killed start has written
        with self.actor.use_weights(self.weights):
            for number, chunk in enumerate(chunks(data)):
                hidden = self.actor.hidden_states(data.select(chunk))
                if writes:
                    hidden_states.write(self.folder, number, hidden)
        if writes:
            tokens, size = len(data.response_ids), self.actor.hf_config.hidden_size * self.dtype.itemsize
            print(f"reference cache: {tokens} tokens of {size} bytes in {self.folder}", flush=True)
        dist.barrier()

    def _output_rows(self) -> Tensor:
        """[padded V / tp, H] this rank's rows of the output matrix."""
        hf_config, given = self.actor.hf_config, self.model.reference
        (name,) = self.actor.mapping.hf_names("output_layer.weight")
        model = self.model.model_copy(update={"path": given, "initialise": "pretrained"}) if given else self.model
        whole = build.start_weights(model, self.seed, hf_config)(name)
        part = shard("output_layer.weight", whole.to(self.dtype), parallel.tp_size(), parallel.tp_rank())
        if not parallel.is_last_stage():
            return part
        own = models.output_weight(self.actor.models[-1])
        return part.to(own.device, own.dtype)


def chunks(data: Batch) -> list[Tensor]:
    """The positions of sequences, in order, in parts of about CHUNK_TOKENS response tokens."""
    before = data.response_lens.cumsum(0) - data.response_lens
    _, sizes = (before // CHUNK_TOKENS).unique_consecutive(return_counts=True)
    return list(torch.arange(len(data)).split(sizes.tolist()))


def _kept_logprobs(path: Path, facts: dict[str, Any]) -> Tensor | None:
    """Log-probs stored by an earlier start of this run; None if there are none. Collective."""
    if not parallel.on_main(path.is_file):
        return None
    try:
        with safe_open(path, "pt") as file:
            stored, logprobs = json.loads(file.metadata()["facts"]), file.get_tensor("logprobs")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}): remove it, and it is computed again") from None
    changed = [name for name, value in facts.items() if stored.get(name) != value]
    if changed:
        raise DataError(f"{path} is of another {changed[0]}, which has changed since this run's first start")
    return logprobs


def train(recipe: Recipe) -> int:
    """Train until run.steps, run.epochs, evaluation.patience or a signal. Returns the exit status."""
    tokenizer, hf_config = build.load_model_files(recipe.model, recipe.run.seed, recipe.lora, recipe.teaching)
    path, teaching = recipe.data.train.path, recipe.teaching
    stored = store.read(path, with_fields=recipe.data.teacher_field is not None)
    shown = shown_again(stored, path, tokenizer)
    check_images(teaching if shown else None, build.tokenizer_folder(recipe.model))
    held_out = [replace(p, images=shown[p.index].images) if p.index in shown else p for p in stored.held_out]
    own = {} if recipe.data.validation else {"validation": held_out}
    evaluated = own | Problems(recipe.data, recipe.environment).of_evaluations(tokenizer)
    held_out = stored.held_out if own and recipe.evaluation.every else None
    kind = recipe.environment and recipe.environment.kind
    check_store(stored, path, tokenizer_fingerprint(build.tokenizer_folder(recipe.model)), held_out, kind)
    options, objective = recipe.algorithm, objectives.build(recipe.algorithm)
    data = objective.annotate(stored.train)
    examples = objective.examples(data)
    alone = recipe.batching.why_not_shared(recipe.megatron.context_parallel_size, whole_sequences(hf_config))
    cost = Costs(data, not alone)
    check_examples(cost, examples, options.name, path, recipe.batching.micro_batch_tokens)
    reference = Reference(recipe.model, recipe.run, options, stored.digest, recipe.lora and recipe.lora.path)
    stream, size = Stream(examples, recipe.run.seed, recipe.data.shuffle), options.batch_sequences // len(examples[0])
    steps = recipe.run.steps or math.ceil(recipe.run.epochs * len(examples) / size)
    of_row = by_row(teaching, recipe.data.teacher_field, stored.fields.items())
    actor = build.Networks(hf_config, recipe).actor(steps, recipe.rollout.temperature)
    given = Teachers(teaching, of_row, actor, recipe.megatron, recipe.model.precision) if teaching else reference
    models = Models(actor, objective.needs, given=given, norms_every=options.part_norms_every)
    if shown:
        models.see(PromptImages(list(shown.values()), Path(path) / ALBUM))
    data = reference.join(actor, data)
    with ExitStack() as stack:
        run = TrainingRun(recipe, tokenizer, models, stream, steps, stack, {}, evaluated)
        return loop.train(run, StoredBatches(run, size, partial(draw, data)), models, objective)


def shown_again(stored: Stored, path: str, tokenizer: Any) -> dict[int, Prompt]:
    """By number, the problems of the store at `path`, if they or its episodes have images, from the data set that it
    was generated from."""
    section = stored.index["facts"].get("images")
    prompts = Problems(Data(**section)).prompts("train", tokenizer).prompts if section else []
    now = {prompt.index: prompt for prompt in prompts}
    for problem, stored_digest in stored.images.items():
        if problem not in now or now[problem].images.digest != stored_digest:
            where = f"row {problem + 1} of {section['train']['path']}"
            raise DataError(f"data.train: the images of {where} are not those that the store {path} was generated from")
    return now


def check_store(stored: Stored, path: str, tokenizer: str, held_out: list[Prompt] | None, kind: str | None) -> None:
    """Check that the trajectories are of this tokenizer (by fingerprint), and that there are held-out problems if the
    run evaluates on them (None: it does not), with the `kind` of environment that the trajectories are of."""
    played = (stored.index["facts"].get("environment") or {}).get("kind")
    if held_out and kind != played:
        raise DataError(
            f"environment.kind: {kind or 'there is none'}, and the trajectories in {path} are of "
            f"{f'the environment {played}' if played else 'no environment'}. Set it as it was, because the held-out "
            "problems are evaluated with it, or set evaluation.every to 0"
        )
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
        what = f"longest {'pair' if len(examples[0]) == 2 else 'trajectory'} has {longest} tokens"
        raise DataError(f"batching.micro_batch_tokens: the {what}, and does not fit {token_budget}")


def draw(data: Batch, examples: list[tuple[int, ...]]) -> Batch:
    """The trajectories of the drawn examples. Those of one example form a unit."""
    index = torch.tensor([position for example in examples for position in example])
    unit = torch.tensor([number for number, example in enumerate(examples) for _ in example])
    return data.select(index).with_sequences(unit=unit)
