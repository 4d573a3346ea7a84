"""What the model families have: names, shapes and limits. No torch."""

from megatron_rft.families.shapes import head_dim, hf_shapes
from megatron_rft.families.tables import FAMILIES, Family, family_of

__all__ = ["FAMILIES", "Family", "family_of", "head_dim", "hf_shapes"]
