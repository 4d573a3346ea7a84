"""A GGUF file into a Hugging Face folder, by transformers' reader, for the families that megatron_rft has.

The reader needs the packages gguf and accelerate (the extra gguf). Quantised weights become fp32: the
same numbers, so a 4-bit file gives the 4-bit model.
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from megatron_rft.conversion.convert import atomic_folder
from megatron_rft.utils.errors import ConfigError, DataError

PACKAGES = ("gguf", "accelerate")  # transformers imports both when it reads such a file


def read_config(path: Path) -> Any:
    """The model's Hugging Face configuration.

    Raises:
        ConfigError: a package is missing.
        DataError: there is no such file, it is no GGUF file, or transformers does not know its architecture.
    """
    if missing := [name for name in PACKAGES if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"reading a GGUF file needs {' and '.join(missing)}: pip install 'megatron-rft[gguf]'")
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        _check_rotary(path)
    except (ValueError, OSError, KeyError) as error:
        raise DataError(f"transformers cannot read {path}: {error}") from None
    # What saving adds about the file does not belong to the model.
    settings = config.to_dict()
    return type(config)(**{k: v for k, v in settings.items() if k not in ("quantization_config", "_name_or_path")})


def _check_rotary(path: Path) -> None:
    """Refuses what transformers' reader would drop without a word."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    names = [tensor.name for tensor in reader.tensors] + list(reader.fields)
    if scaled := [name for name in names if name.startswith("rope_freqs") or ".rope.scaling." in name]:
        raise DataError(
            f"{path} scales its rotary frequencies ({scaled[0]}; Llama 3.1 and later do), and transformers' reader "
            "drops that: convert the model's Hugging Face checkpoint instead"
        )


def convert_gguf(path: Path, config: Any, out: Path, file_bytes: int = 4 << 30) -> int:
    """Write the model `path` with its tokenizer to the new folder `out`, in fp32. Returns the number of parameters.

    Raises:
        DataError: `out` exists, or the tensors do not fit the configuration that transformers read.
    """
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with atomic_folder(out) as partial:
        AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
        read, info = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
        if missing := sorted(info["missing_keys"]):  # the reader would leave them random
            raise DataError(f"{path}: transformers' reader finds no {missing[0]} in it ({len(missing)} are missing)")
        model = type(read)(config)  # transformers does not save a model that it has read as quantised
        try:
            model.load_state_dict(read.state_dict())
        except RuntimeError as error:
            raise DataError(
                f"{path}: its tensors do not fit the configuration that transformers reads: {error}"
            ) from None
        model.save_pretrained(partial, max_shard_size=file_bytes)
    return sum(parameter.numel() for parameter in model.parameters())
