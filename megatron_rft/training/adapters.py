"""The adapters of a run: what they start from, the base that a checkpoint's adapters belong to, and their export."""

import json
from pathlib import Path
from typing import Any

from megatron_rft.config import Model
from megatron_rft.config.lora import Lora
from megatron_rft.conversion import lora
from megatron_rft.conversion.folder import model_fingerprint
from megatron_rft.data.hub import model_folder
from megatron_rft.megatron import parallel, weights
from megatron_rft.megatron.actor import Actor
from megatron_rft.utils.errors import DataError


def load_start(actor: Actor, model: Model, seed: int) -> None:
    """Set the actor's adapters, if it has any: those of lora.path, else new ones."""
    options, hf_config = actor.lora, actor.hf_config
    if options is not None:
        new = options.path is None
        made = weights.new_adapters(hf_config, options, seed) if new else read_start(options, model, seed, hf_config)
        actor.load(made, adapters=True)


def read_start(options: Lora, model: Model, seed: int, hf_config: Any) -> lora.Lookup:
    """The adapters in lora.path. Raises DataError if they are of another model, or others than `options` says."""
    try:
        return lora.read(Path(options.path), options, hf_config, base_of(model, seed))
    except DataError as error:
        raise DataError(f"lora.path: {error}") from None


def base_of(model: Model, seed: int) -> str:
    """The fingerprint of the frozen model."""
    fingerprint = model_fingerprint(model_folder(model.path))
    return f"random weights of seed {seed}, {fingerprint}" if model.initialise == "random" else fingerprint


def export(actor: Actor, folder: Path, model: Model, seed: int) -> None:
    """Write the adapters in PEFT's format. Collective; rank 0 writes."""
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in actor.stream(adapters=True)}
    if parallel.rank() == 0:
        base = str(model_folder(model.path).resolve())
        lora.write(folder, tensors.items(), actor.lora, actor.hf_config, base, base_of(model, seed))


def check_base(checkpoint: Path, inputs: dict[str, str], fix: str = "Restore it, or change run.output_dir") -> None:
    """Check that the frozen models are those of the checkpoint's adapters. `inputs`: digests by option."""
    saved = json.loads((checkpoint / "run.json").read_text())["inputs"]
    for option in sorted(saved.keys() & inputs.keys() & {"model.path", "critic.path"}):
        if saved[option] != inputs[option]:
            why = f"{checkpoint.name} has adapters of another model than the one that is there now"
            raise DataError(f"{option}: {why}. {fix}")
