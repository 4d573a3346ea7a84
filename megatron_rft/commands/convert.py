"""`megatron-rft convert`: finds the source checkpoint and its format, and converts it."""

import argparse
import os
from pathlib import Path

import torch

from megatron_rft.config import Model, load_saved
from megatron_rft.conversion import convert as conversion
from megatron_rft.conversion import load_config, lora
from megatron_rft.conversion.convert import Conversion, SourceCheckpoint
from megatron_rft.conversion.folder import model_fingerprint
from megatron_rft.conversion.lora import Merged
from megatron_rft.conversion.torch_dist import CONFIG, METADATA, AdapterCheckpoint
from megatron_rft.data.hub import model_folder
from megatron_rft.families.checks import why_unsupported
from megatron_rft.launching.run_folder import RECIPE_FILE
from megatron_rft.training import adapters, build
from megatron_rft.utils.checkpoint_files import DIGESTS, complete, damage
from megatron_rft.utils.errors import FINISHED, ConfigError, DataError, RunFailed


def find_source(path: str, like: str | None = None, option: str = "source") -> SourceCheckpoint:
    """Find the checkpoint at `path`: a Hugging Face folder or hub name, a torch_dist checkpoint, or a training run,
    whose newest checkpoint is used.

    `option`: the argument with the path, for messages. `like`: a folder or hub name with config.json and the tokenizer,
    if the checkpoint has none; of adapters the model that they belong to.
    """
    like = like and str(model_folder(like, "like"))
    place = Path(os.path.abspath(Path(path).expanduser()))  # a run's recipe is two folders above its checkpoint
    if (place / lora.CONFIG).is_file():
        raise DataError(f"{path} has adapters alone: PEFT's merge_and_unload makes a model of them and their base")
    folder = _checkpoint_in(place)
    if folder and (stored := folder.parent.parent / RECIPE_FILE).is_file() and load_saved(stored).lora:
        return _of_adapters(folder, stored, like)
    if folder is None:
        folder = model_folder(path, option)
        companions = Path(like) if like else folder
        return SourceCheckpoint(folder, "hf", load_config(companions), companions)
    model, companions = _model_of(folder, like)
    return SourceCheckpoint(folder, "megatron", load_config(model), companions)


def _checkpoint_in(path: Path) -> Path | None:
    """The torch_dist checkpoint at or in `path`, or None."""
    if any((path / name).is_file() for name in (METADATA, CONFIG)) or list(path.glob("*.distcp")):
        if (path / DIGESTS).is_file() and (wrong := damage(path)):
            raise DataError(f"{path} is damaged: {wrong}. Choose another, or remove its {DIGESTS} to read it as it is")
        return path
    folder = path / "checkpoints" if (path / RECIPE_FILE).is_file() else path
    if folder.name != "checkpoints" or not folder.is_dir():
        return None
    for checkpoint in reversed(complete(folder)):
        if not (wrong := damage(checkpoint)):
            return checkpoint
        print(f"{checkpoint.name} is damaged ({wrong}) and is passed over", flush=True)
    raise DataError(f"{folder} has no complete and intact checkpoint (step_*)")


def _of_adapters(folder: Path, stored: Path, like: str | None) -> SourceCheckpoint:
    """A checkpoint of adapters, on the model of the run's recipe `stored`, which may be at `like` now."""
    recipe = load_saved(stored)
    model = recipe.model.model_copy(update={"path": like, "tokenizer": None} if like else {})
    base, tokenizer = _folders(model, stored)
    hf_config = build.load_hf_config(model)
    fix = f"Name as `like` the model that they were trained on, which {base} is not"
    adapters.check_base(folder, {"model.path": model_fingerprint(base)}, fix)
    found = AdapterCheckpoint(folder, hf_config, recipe.lora)
    dtype = torch.float32 if recipe.model.precision == "fp32" else torch.bfloat16
    merged = Merged(build.start_weights(model, recipe.run.seed, hf_config), found, recipe.lora, dtype)
    return SourceCheckpoint(folder, "megatron", hf_config, tokenizer, merged)


def _model_of(folder: Path, like: str | None) -> tuple[Path, Path]:
    """Folders of config.json and of the tokenizer."""
    export, stored = folder.parent.parent / "export", folder.parent.parent / RECIPE_FILE
    there = [place for place in (folder, export) if (place / "config.json").is_file()]  # a run may have been moved away
    if like or there:
        place = Path(like or there[0])
        return place, place
    if not stored.is_file():
        raise DataError(
            f"{folder} does not say which model it is: it has no config.json, and is not in a run's folder. Name "
            "a model of the same architecture as `like`, by its folder or hub name"
        )
    return _folders(load_saved(stored).model, stored)


def _folders(model: Model, stored: Path) -> tuple[Path, Path]:
    """Those of the model and the tokenizer of the recipe `stored`."""
    try:
        return model_folder(model.path), build.tokenizer_folder(model)
    except DataError as error:
        raise DataError(f"{error} (from {stored}); if it was moved, name it as `like`") from None


def run(args: argparse.Namespace) -> int:
    report = convert(args.source, args.out, args.to, args.like)
    if report is not None:
        print(f"{report.tensors} tensors, {report.bytes / 2**30:.2f} GiB: names, shapes and bits equal the source's")
        print(f"digest of the model: {report.digest}")
    return FINISHED


def convert(path: str, out: Path, to: str | None = None, like: str | None = None) -> Conversion | None:
    """Convert the checkpoint at `path`. Returns None for adapters in PEFT's format."""
    source = find_source(path, like)
    if refused := why_unsupported(source.hf_config):
        raise DataError(f"{source.path}: {refused}")
    to = to or ("megatron" if source.format == "hf" else "hf")
    print(f"{source.path} ({source.format}) -> {out} ({to})", flush=True)
    return write_peft(source, out, like) if to == "peft" else conversion.convert(source, out, to)


def write_peft(source: SourceCheckpoint, out: Path, like: str | None) -> None:
    """Write the adapters of a run's checkpoint in PEFT's format, and read them back."""
    if source.merged is None or not isinstance(source.merged.adapters, AdapterCheckpoint):
        raise ConfigError("to: peft needs a source that trains adapters: a run, or a checkpoint in its folder")
    trained, recipe = source.merged.adapters, load_saved(source.path.parent.parent / RECIPE_FILE)
    model = recipe.model.model_copy(update={"path": like or recipe.model.path})
    base = adapters.base_of(model, recipe.run.seed)
    with conversion.atomic_folder(out) as partial:
        tensors = {name: trained(name) for name in trained.parts}
        where = str(model_folder(model.path).resolve())
        lora.write(partial, tensors.items(), trained.options, source.hf_config, where, base)
        written = lora.read(partial, trained.options, source.hf_config, base)
        if not all(torch.equal(written(name), tensor) for name, tensor in tensors.items()):
            raise RunFailed("the adapters do not read back as they were written: the disk or the memory is faulty")
    print(f"{len(tensors)} tensors of adapters: names, shapes and bits equal the source's")
