"""The tensors of vision towers, by transformers' names. No torch.

A tower is transformers' own module beside the first layers of the language model. Its parameters are whole on every
rank, and canonical names have `TOWER` where a file has the family's prefix.
"""

from types import SimpleNamespace
from typing import Any

from megatron_rft.families.tables import FAMILIES

TOWER = "visual."


def sees(config: Any) -> bool:
    """Return whether the model reads images."""
    family = FAMILIES.get(config.model_type)
    return bool(family and family.tower)


def vision_of(config: Any) -> Any:
    """The configuration of the tower, whose part in a config.json is a dictionary."""
    given = config.vision_config
    return SimpleNamespace(**given) if isinstance(given, dict) else given


def never_sampled(config: Any) -> tuple[int, ...]:
    """Tokens that stand for what is seen, and that no response has."""
    return (config.image_token_id, config.video_token_id) if sees(config) else ()


def deep_layers(config: Any) -> int:
    """The number of first layers that get features of the tower of their own: Qwen3-VL's deepstack."""
    return len(getattr(vision_of(config), "deepstack_visual_indexes", ()))


def tower_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the tower by its name in the tower."""
    c = vision_of(config)
    deep, size = hasattr(c, "deepstack_visual_indexes"), c.hidden_size
    patch = (getattr(c, "in_channels", 3), c.temporal_patch_size, c.patch_size, c.patch_size)
    shapes = {"patch_embed.proj.weight": (size, *patch)}
    if deep:
        shapes |= {"patch_embed.proj.bias": (size,), "pos_embed.weight": (c.num_position_embeddings, size)}
    for number in range(c.depth):
        shapes |= {f"blocks.{number}.{name}": shape for name, shape in _block(size, c.intermediate_size, deep).items()}
    shapes |= _merger(c, "merger", "norm" if deep else "ln_q", size)
    for number in range(deep_layers(config)):
        shapes |= _merger(c, f"deepstack_merger_list.{number}", "norm", size * c.spatial_merge_size**2)
    return shapes


def _block(size: int, ffn: int, deep: bool) -> dict[str, tuple[int, ...]]:
    shapes = {f"norm{number}.weight": (size,) for number in (1, 2)}
    if deep:
        shapes |= {f"norm{number}.bias": (size,) for number in (1, 2)}
        layers = {"linear_fc1": (ffn, size), "linear_fc2": (size, ffn)}
    else:
        layers = {"gate_proj": (ffn, size), "up_proj": (ffn, size), "down_proj": (size, ffn)}
    shapes |= _linear("attn.qkv", 3 * size, size) | _linear("attn.proj", size, size)
    for name, (rows, columns) in layers.items():
        shapes |= _linear(f"mlp.{name}", rows, columns)
    return shapes


def _merger(c: Any, name: str, norm: str, normed: int) -> dict[str, tuple[int, ...]]:
    """Of the layers that make a token's features from `spatial_merge_size` squared patches."""
    merged, own = c.hidden_size * c.spatial_merge_size**2, {f"{name}.{norm}.weight": (normed,)}
    first, last = ("linear_fc1", "linear_fc2") if norm == "norm" else ("mlp.0", "mlp.2")
    own |= {f"{name}.{norm}.bias": (normed,)} if norm == "norm" else {}
    return own | _linear(f"{name}.{first}", merged, merged) | _linear(f"{name}.{last}", c.out_hidden_size, merged)


def _linear(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
