"""HF <-> megatron-core: names, shapes and the files of an HF folder. Process groups are in `megatron.weights`."""

from megatron_rft.conversion.families import FAMILIES, Family, family_of
from megatron_rft.conversion.folder import FolderWriter, HFFolder, load_config
from megatron_rft.conversion.mapping import Mapping, hf_shapes
from megatron_rft.conversion.shards import padded_vocab, partition_dim, shard, unshard

__all__ = [
    "FAMILIES",
    "Family",
    "FolderWriter",
    "HFFolder",
    "Mapping",
    "family_of",
    "hf_shapes",
    "load_config",
    "padded_vocab",
    "partition_dim",
    "shard",
    "unshard",
]
