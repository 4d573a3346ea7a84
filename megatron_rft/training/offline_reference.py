"""The frozen reference of offline training: its log-probs of the data, and its full distribution.

Log-probs of the data are computed once and stored with the run. The full distribution, which a forward KL and FPA need,
comes in each step from a forward pass with the reference's weights (`recompute`), or from hidden states that are
computed and stored once (`cached_hidden`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_rft.config import Model, Recipe
from megatron_rft.conversion import fingerprint, shard
from megatron_rft.data.hidden_states import INDEX, HiddenCache, Writer
from megatron_rft.data.hub import model_folder
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.megatron.second_distribution import Recorded, Second
from megatron_rft.objectives.base import Update
from megatron_rft.records import Batch
from megatron_rft.training import build
from megatron_rft.training.engines import DTYPES, gather
from megatron_rft.training.models import LOGPROBS, Models
from megatron_rft.utils.errors import DataError
from megatron_rft.utils.files import replacing

CHUNK_TOKENS = 1 << 16  # response tokens that are computed and written together
LOGPROBS_FILE = "reference_logprobs.safetensors"


@dataclass(frozen=True)
class ReferenceSource:
    """The inputs of the reference's log-probs and hidden states, and the folders where they are stored."""

    model: Model
    seed: int
    run_folder: Path
    digest: str  # of the data
    compares: bool = False  # the objective needs the reference's full distribution
    cached: bool = False  # from stored hidden states, without a second pass
    cache: str | None = None  # algorithm.reference_cache

    @classmethod
    def of(cls, recipe: Recipe, digest: str) -> "ReferenceSource":
        options, compares = recipe.algorithm, recipe.algorithm.compares_distributions
        cached = compares and options.reference == "cached_hidden"
        cache = options.reference_cache if cached else None
        return cls(recipe.model, recipe.run.seed, Path(recipe.run.output_dir), digest, compares, cached, cache)

    @property
    def cache_folder(self) -> Path | None:
        """The folder of the hidden states; None if the run uses none."""
        return Path(self.cache or self.run_folder / "reference_cache") if self.cached else None

    def check_cache(self) -> None:
        """Check, before a model is built, that an existing cache is complete and of this run's data and model.

        Raises:
            DataError: it is not, or the folder holds other files.
        """
        folder = self.cache_folder
        if folder is not None and folder.exists() and any(folder.iterdir()):
            HiddenCache(folder, self.facts())

    def facts(self) -> dict[str, Any]:
        """The facts that determine the reference's log-probs and hidden states."""
        path, option = self.model.path, "model.path"
        if self.model.reference is not None:
            path, option = self.model.reference, "model.reference"
        random = self.model.reference is None and self.model.initialise == "random"
        model = fingerprint.of_model(model_folder(path, option))
        return {
            "data": self.digest,
            "model": f"random weights of seed {self.seed}, {model}" if random else model,
            "tokenizer": fingerprint.of_tokenizer(build.tokenizer_folder(self.model)),
            "dtype": str(DTYPES[self.model.precision]).removeprefix("torch."),
        }

    def output_weight(self, hf_config: Any) -> Tensor:
        """[V, H] the whole output matrix."""
        name = "model.embed_tokens.weight" if hf_config.tie_word_embeddings else "lm_head.weight"
        if self.model.reference is None:
            return build.start_weights(self.model, self.seed, hf_config)(name)
        return weights.open_folder(model_folder(self.model.reference, "model.reference"), hf_config)(name)


class Reference:
    """Build it while the actor has the initial weights. `data` is the whole data set."""

    def __init__(self, source: ReferenceSource, actor: Actor, data: Batch):
        self.source, self.actor, self.weights, self.cache = source, actor, None, None
        folder, path = source.cache_folder, source.run_folder / LOGPROBS_FILE
        self.facts = source.facts()
        assert self.facts["dtype"] == str(_dtype(actor)).removeprefix("torch."), self.facts
        kept = _kept_logprobs(path, self.facts)
        missing = source.cached and not parallel.on_main((folder / INDEX).is_file)
        if kept is None or missing or (source.compares and not source.cached):
            self.weights = build.reference_weights(source.model, source.seed, actor)
        self.logprobs = kept if kept is not None else self._logprobs(data, path)
        if source.cached:
            if missing:
                self._write_cache(data, folder)
            self.cache, self.output = self._open_cache(folder)
        if not source.compares or source.cached:
            self.weights = None

    def data(self, data: Batch) -> Batch:
        """`data` with the reference's log-probs and each token's index in the data set."""
        return data.with_tokens(ref_logprobs=self.logprobs, data_index=torch.arange(len(data.response_ids)))

    def second(self, update: Update, batch: Batch) -> Second | Recorded | None:
        """The reference's distribution, if `update` compares with it."""
        if update.second is None:
            return None
        if self.cache is None:
            return Second(batch, self.weights, update.second.extrapolation)
        index = batch.tokens["data_index"]
        return Recorded(batch, lambda tokens: self.cache.rows(index[tokens]), self.output, update.second.extrapolation)

    def _logprobs(self, data: Batch, path: Path) -> Tensor:
        with self.actor.use_weights(self.weights):
            parts = [self.actor.outputs(data.select(chunk), LOGPROBS)["logprobs"] for chunk in chunks(data)]
        found = torch.cat(parts)
        if dist.get_rank() == 0:
            with replacing(path) as new:
                save_file({"logprobs": found}, new, metadata={"facts": json.dumps(self.facts)})
        return found

    def _write_cache(self, data: Batch, folder: Path) -> None:
        """Collective. One rank of the last pipeline stage writes."""
        writes = parallel.is_last_stage() and parallel.tp_rank() == parallel.cp_rank() == parallel.dp_rank() == 0
        writer = Writer(folder) if writes else None
        with self.actor.use_weights(self.weights):
            for chunk in chunks(data):
                hidden = self.actor.hidden_states(data.select(chunk))
                if writer:
                    writer.add(hidden)
        if writer:
            writer.finish(self.source.output_weight(self.actor.hf_config).to(_dtype(self.actor)), self.facts)
            print(describe(writer.tokens, self.actor.hf_config, _dtype(self.actor), folder), flush=True)
        dist.barrier()

    def _open_cache(self, folder: Path) -> tuple[HiddenCache, Tensor]:
        """The verified cache, and this rank's rows of its output matrix."""
        cache = HiddenCache(folder, self.facts)
        torn = [path for path in gather([cache.verify(dist.get_rank(), dist.get_world_size())]) if path]
        if torn:
            raise DataError(f"algorithm.reference_cache: {torn[0]} is not as it was written: remove {folder}")
        part = shard("output_layer.weight", cache.output_weight(), parallel.tp_size(), parallel.tp_rank())
        if parallel.is_last_stage():
            own = models.output_weight(self.actor.models[-1])
            part = part.to(own.device, own.dtype)
            assert len(part) == len(own), f"output matrix: {len(part)} rows in the cache, {len(own)} in the model"
        return cache, part


def chunks(data: Batch) -> list[Tensor]:
    """The positions of sequences, in order, in parts of about CHUNK_TOKENS response tokens."""
    before = data.response_lens.cumsum(0) - data.response_lens
    _, sizes = (before // CHUNK_TOKENS).unique_consecutive(return_counts=True)
    return list(torch.arange(len(data)).split(sizes.tolist()))


def describe(tokens: int, hf_config: Any, dtype: torch.dtype, folder: Path) -> str:
    """A line with the size of the cache, compared with logits."""
    each, logits = hf_config.hidden_size * dtype.itemsize, hf_config.vocab_size * dtype.itemsize
    return (
        f"reference cache: {tokens} tokens of {each} bytes, {tokens * each / 2**20:.1f} MiB in {folder}; "
        f"logits would take {logits} bytes a token, {logits / each:.0f} times as much"
    )


def _dtype(actor: Actor) -> torch.dtype:
    return next(actor.models[-1].parameters()).dtype


def _kept_logprobs(path: Path, facts: dict[str, Any]) -> Tensor | None:
    """Log-probs stored by an earlier start of this run; None if there are none. Collective."""
    if not parallel.on_main(path.is_file):
        return None
    try:
        with safe_open(path, "pt") as file:
            found, logprobs = json.loads(file.metadata()["facts"]), file.get_tensor("logprobs")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error}): remove it, and it is computed again") from None
    changed = [name for name, value in facts.items() if found.get(name) != value]
    if changed:
        raise DataError(f"{path} is of another {changed[0]}, which has changed since this run's first start")
    return logprobs


@dataclass
class OfflineModels(Models):
    """The actor and the frozen reference."""

    reference: Reference | None = None

    def second(self, update: Update, mini_batch: Batch) -> Second | Recorded | None:
        return self.reference.second(update, mini_batch)
