"""Loads model folders as the run does: its own code reads names, shapes and dtypes, and tensors have no values.

A folder here may have its files of weights, or only their index, or only config.json. Absent files are taken to have
the tensors that the index names, or those of the family, in the dtype of config.json. The run's own checks then tell
which tensors are missing, unknown or of another shape.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_rft.conversion import HFFolder, hf_shapes
from megatron_rft.rehearsal.device import FakeDevice


class Header:
    """The names, shapes and dtypes of a file's tensors, as `safe_open` gives them. The tensors have no values."""

    def __init__(self, tensors: dict[str, tuple[tuple[int, ...], torch.dtype]], mode: FakeDevice):
        self.tensors, self.mode = tensors, mode

    def keys(self) -> list[str]:
        return list(self.tensors)

    def get_slice(self, name: str) -> Any:
        return SimpleNamespace(get_shape=lambda: self.tensors[name][0])

    def get_tensor(self, name: str) -> Tensor:
        shape, dtype = self.tensors[name]
        return self.mode.on_host(lambda: torch.empty(shape, dtype=dtype))


class ModelFolder(HFFolder):
    """The run's model folder, whose files may be absent."""

    def __init__(self, path: Path, hf_config: Any, mode: FakeDevice):
        self.hf_config, self.mode, index = hf_config, mode, Path(path, "model.safetensors.index.json")
        self.absent = not any(file for kind in ("*.safetensors", "*.bin") for file in Path(path).glob(kind))
        self.of_absent = dict.fromkeys(hf_shapes(hf_config), "model.safetensors")  # tensor name -> file name
        if self.absent and index.is_file():
            self.of_absent = json.loads(index.read_text())["weight_map"]
        super().__init__(path, hf_config)

    def _weight_files(self) -> list[str]:
        return sorted(set(self.of_absent.values())) if self.absent else super()._weight_files()

    def _read(self, file: str) -> Header:
        if not self.absent:
            return self._header(super()._read(file))
        shapes, dtype = hf_shapes(self.hf_config), getattr(self.hf_config, "dtype", None) or torch.bfloat16
        names = [name for name, its_file in self.of_absent.items() if its_file == file]
        return Header({name: (shapes.get(name, ()), dtype) for name in names}, self.mode)

    def _header(self, tensors: Any) -> Header:
        parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118  it is no dict
        return Header({n: (tuple(part.get_shape()), part[:0].dtype) for n, part in parts.items()}, self.mode)


def header(shapes: dict[str, tuple[int, ...]], mode: FakeDevice) -> Header:
    """Of new tensors, which are fp32."""
    return Header({name: (shape, torch.float32) for name, shape in shapes.items()}, mode)
