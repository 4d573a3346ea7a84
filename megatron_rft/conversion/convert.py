"""Converts a checkpoint: copies tensor by tensor, reads the copy back, compares it, and only then renames it to `out`.

Source and target are each a Hugging Face folder or a torch_dist checkpoint; with the same format on both sides only the
files are split differently. Optimizer and schedule of a training checkpoint are not copied.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_rft.conversion.folder import FolderWriter, HFFolder, copy_companions, whole_config
from megatron_rft.conversion.lora import Merged
from megatron_rft.conversion.torch_dist import MegatronFolder
from megatron_rft.conversion.torch_dist_writer import MegatronWriter
from megatron_rft.families.shapes import hf_shapes
from megatron_rft.utils.errors import DataError, RunFailed, disk_is_full

Format = Literal["hf", "megatron"]
REPORT_FILE = "conversion.json"


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint to read. `companions`: the folder with its config.json and tokenizer. `merged`: of a checkpoint of
    adapters, the model with them."""

    path: Path
    format: Format
    hf_config: Any
    companions: Path
    merged: Merged | None = None

    def open(self) -> HFFolder | MegatronFolder | Merged:
        """Return a lookup of tensors by HF name. Raises DataError if they are not exactly the tensors of the model."""
        return self.merged or (HFFolder if self.format == "hf" else MegatronFolder)(self.path, self.hf_config)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (HF name, tensor) for the whole model."""
        lookup = self.open()
        return ((name, lookup(name)) for name in hf_shapes(self.hf_config))


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion. `digest` hashes the names, dtypes, shapes and bits of all tensors: a model has the
    same digest in both formats."""

    source: str
    format: Format
    tensors: int
    bytes: int
    digest: str


def convert(source: SourceCheckpoint, out: Path, to: Format, *, file_bytes: int = 4 << 30) -> Conversion:
    """Write `source` to the new folder `out`.

    Raises:
        DataError: the source is incomplete or not this model, `out` exists, or the disk is too small.
        RunFailed: the written tensors differ from the source when they are read back.
    """
    lookup = source.open()
    _check_space(out, lookup, source.hf_config)
    with atomic_folder(out) as partial:
        read = RecordingReader(lookup)
        if to == "hf":
            writer = FolderWriter(partial, file_bytes)
            for name in hf_shapes(source.hf_config):
                writer.add(name, read(name))
            writer.finish(source.hf_config, source.companions)
        else:
            partial.mkdir(parents=True)
            MegatronWriter(partial, source.hf_config, file_bytes).write(read)
            whole_config(source.hf_config).save_pretrained(partial)
            copy_companions(source.companions, partial)
        _compare(read, replace(source, path=partial, format=to, merged=None).open())
        report = Conversion(str(source.path), to, len(read.seen), read.bytes, read.digest())
        (partial / REPORT_FILE).write_text(json.dumps(asdict(report), indent=1) + "\n")
    return report


class RecordingReader:
    """A lookup that records the fingerprints of the tensors it returned."""

    def __init__(self, lookup: Callable[[str], Tensor]):
        self.lookup, self.seen, self.bytes = lookup, {}, 0

    def __call__(self, name: str) -> Tensor:
        tensor = self.lookup(name)
        if name not in self.seen:
            self.seen[name] = fingerprint(tensor)
            self.bytes += tensor.nbytes
        return tensor

    def digest(self) -> str:
        return hashlib.blake2b(repr(sorted(self.seen.items())).encode(), digest_size=16).hexdigest()


def fingerprint(tensor: Tensor) -> str:
    """Return a hash of a tensor's dtype, shape and bits."""
    content = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)} ".encode(), digest_size=16)
    content.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return content.hexdigest()


def _compare(read: RecordingReader, written: Callable[[str], Tensor]) -> None:
    different = [name for name, expected in read.seen.items() if fingerprint(written(name)) != expected]
    if different:
        raise RunFailed(
            f"{len(different)} of {len(read.seen)} tensors do not read back as they were written, the first is "
            f"{different[0]}: the disk or the memory is faulty. Nothing was kept"
        )


def _check_space(out: Path, lookup: Callable[[str], Tensor], hf_config: Any) -> None:
    elements = sum(torch.Size(shape).numel() for shape in hf_shapes(hf_config).values())
    needed = elements * lookup(next(iter(hf_shapes(hf_config)))).element_size()
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if (free := shutil.disk_usage(existing).free) < needed:
        raise DataError(f"{out}: {needed / 2**30:.2f} GiB are needed and {free / 2**30:.2f} GiB are free there")


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to the new folder `out` at the end, and removed after a failure."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} exists already: choose a new folder, or remove it")
    partial = out.with_name(f".{out.name}.converting")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
    except (OSError, RuntimeError, SafetensorError) as error:
        if disk_is_full(error):
            raise DataError(f"{out}: the disk is full; nothing was left there") from error
        if isinstance(error, OSError):
            # a failed write names no file, and safetensors names it in its words alone
            place = Path(error.filename or (partial if error.errno else str(error)))
            written = partial.name in str(place) or place in (out, *out.parents)
            what = f"{out} cannot" if written else "the source (of a run that removes old checkpoints?) can no longer"
            raise DataError(f"{what} be {'written' if written else 'read'}: {error}") from error
        raise
    finally:
        for left in (partial, partial.with_name(f".{partial.name}.partial")):
            shutil.rmtree(left, ignore_errors=True)
