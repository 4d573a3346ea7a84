"""`megatron-rft convert`: finds the source checkpoint and its format, converts it, and compares logits on request."""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_rft.config import load
from megatron_rft.config.sections import Megatron
from megatron_rft.conversion import convert as conversion
from megatron_rft.conversion import gguf, load_config
from megatron_rft.conversion.convert import Format, Source
from megatron_rft.conversion.torch_dist import CONFIG, METADATA
from megatron_rft.data.hub import model_folder
from megatron_rft.megatron import model as models
from megatron_rft.megatron import parallel, weights
from megatron_rft.training import build
from megatron_rft.training.run_folder import RECIPE_FILE
from megatron_rft.utils.checkpoint_files import complete, damage
from megatron_rft.utils.errors import ConfigError, DataError, RunFailed
from megatron_rft.utils.exit_codes import FINISHED

OTHER: dict[Format, Format] = {"hf": "megatron", "megatron": "hf"}


def find_source(path: str, like: str | None = None, option: str = "the checkpoint to convert") -> Source:
    """Find the checkpoint at `path`: a Hugging Face folder or hub name, a torch_dist checkpoint, or a training run,
    whose newest checkpoint is used.

    `option`: the argument with the path, for messages. `like`: a folder or hub name with config.json and the tokenizer,
    if the checkpoint has none.
    """
    folder = _checkpoint_in(Path(path).expanduser())
    if folder is None:
        folder = model_folder(path, option)
        companions = model_folder(like, "--like") if like else folder
        return Source(folder, "hf", load_config(companions), companions)
    model, companions = _model_of(folder, like)
    return Source(folder, "megatron", load_config(model), companions)


def _checkpoint_in(path: Path) -> Path | None:
    """The torch_dist checkpoint at or in `path`, or None."""
    if any((path / name).is_file() for name in (METADATA, CONFIG)) or list(path.glob("*.distcp")):
        return path
    folder = path / "checkpoints" if (path / RECIPE_FILE).is_file() else path
    if folder.name != "checkpoints" or not folder.is_dir():
        return None
    for found in reversed(complete(folder)):
        if not (wrong := damage(found)):
            return found
        print(f"{found.name} is damaged ({wrong}) and is passed over", flush=True)
    raise DataError(f"{folder} has no complete and intact checkpoint (step_*)")


def _model_of(folder: Path, like: str | None) -> tuple[Path, Path]:
    """Folders of config.json and of the tokenizer."""
    if like:
        return (model_folder(like, "--like"),) * 2
    if (folder / "config.json").is_file():
        return folder, folder
    stored = folder.parent.parent / RECIPE_FILE
    if not stored.is_file():
        raise DataError(
            f"{folder} does not say which model it is: it has no config.json, and is not in a run's folder. Give "
            "--like, a folder or hub name of a model of the same architecture"
        )
    recipe = load(stored)
    try:
        return model_folder(recipe.model.path), build.tokenizer_folder(recipe.model)
    except DataError as error:
        raise DataError(f"{error} (from {stored}); if it was moved, give --like") from None


def run(args: argparse.Namespace) -> int:
    if args.source.lower().endswith(".gguf"):
        return run_gguf(args)
    source = find_source(args.source, args.like)
    models.check_architecture(source.hf_config)
    to = args.to or OTHER[source.format]
    if args.tensor_parallel and to == "hf":
        raise ConfigError("--tensor-parallel does nothing for a Hugging Face folder: leave it out")
    print(f"{source.path} ({source.format}) -> {args.out} ({to})", flush=True)
    report = conversion.convert(
        source,
        args.out,
        to,
        tensor_parallel=args.tensor_parallel or 1,
        file_bytes=round(args.file_gib * 2**30),
        check=partial(compare_logits, source, to) if args.logits else lambda _: None,
    )
    print(f"{report.tensors} tensors, {report.bytes / 2**30:.2f} GiB: names, shapes and bits equal the source's")
    print(f"digest of the model: {report.digest}")
    return FINISHED


def run_gguf(args: argparse.Namespace) -> int:
    """Convert a GGUF file, which has configuration, tokenizer and weights, to a Hugging Face folder."""
    for option in ("like", "tensor_parallel", "logits"):
        if getattr(args, option):
            raise ConfigError(f"--{option.replace('_', '-')} does nothing for a GGUF file: leave it out")
    if args.to == "megatron":
        raise ConfigError("--to: a GGUF file becomes a Hugging Face folder (hf); convert that to megatron")
    path = Path(args.source).expanduser()
    config = gguf.read_config(path)
    models.check_architecture(config)
    print(f"{path} (gguf) -> {args.out} (hf, fp32)", flush=True)
    parameters = gguf.convert_gguf(path, config, args.out, round(args.file_gib * 2**30))
    print(f"{parameters:,} parameters of a {config.model_type} model, and its tokenizer")
    return FINISHED


def compare_logits(source: Source, to: Format, written: Path) -> None:
    """Compare the logits of 32 tokens before and after the conversion, in fp32. Loads one model after the other.

    Raises:
        RunFailed: the logits differ.
    """
    ids = torch.arange(32)[None] * 7919 % source.hf_config.vocab_size
    before = logits_of(source.path, source.format, source, ids)
    after = logits_of(written, to, source, ids)
    largest, difference = before.abs().max().item(), (before - after).abs().max().item()
    print(f"logits differ by at most {difference:.1e}; the largest is {largest:.1f}", flush=True)
    if not difference <= 1e-4 * max(largest, 1.0):
        raise RunFailed("the converted model has other logits than the source: the result was removed")


@torch.no_grad()
def logits_of(folder: Path, format: Format, source: Source, ids: Tensor) -> Tensor:
    """[b, s, V] logits by transformers (format hf) or megatron-core (format megatron)."""
    if format == "hf":
        model = AutoModelForCausalLM.from_pretrained(folder, config=source.hf_config, dtype=torch.float32).eval()
        return model(ids).logits
    parallel.initialize(Megatron())
    try:
        chunks = models.build(source.hf_config, Megatron(), "fp32")
        weights.load(chunks, conversion.open_checkpoint(folder, format, source.hf_config), source.hf_config)
        device = parallel.device()
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
        hidden = chunks[0].eval()(ids.to(device), positions, None)
        return (hidden @ models.output_weight(chunks[0]).T)[..., : source.hf_config.vocab_size].cpu()
    finally:
        parallel.shutdown()
