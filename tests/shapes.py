"""Sizes of models that several tests share, for configurations of transformers."""

import json
import math
from pathlib import Path

from megatron_rft.families.shapes import hf_shapes, of_json


def sizes(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, **more) -> dict:
    """The fields of these sizes in a config.json, and of `more`."""
    names = dict(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=kv_heads)
    return names | dict(intermediate_size=ffn) | more


SMALL = sizes(2, 16, 4, 2, 24, vocab_size=11, head_dim=8)
# Small, with sizes that the kernels of Transformer Engine and vLLM take.
FOR_KERNELS = SMALL | dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    head_dim=64,
    max_position_embeddings=2048,
    eos_token_id=0,
    bos_token_id=None,
    pad_token_id=None,
)


def json_of(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, head_dim: int, **more):
    """The content of a config.json. `more` may name another `model_type` than llama, and its fields."""
    more = dict(model_type="llama", max_position_embeddings=131_072) | more
    return sizes(layers, hidden, heads, kv_heads, ffn, vocab_size=vocabulary, head_dim=head_dim) | more


def write_model(folder: Path, config: dict, tensors_of: dict | None = None) -> None:
    """A model's folder, whose weights are zeros that take no room. `tensors_of`: the configuration of its tensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in hf_shapes(of_json({"tie_word_embeddings": False} | (tensors_of or config))).items():
        offsets = [end, end := end + 2 * math.prod(shape)]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
