"""Converts names, shapes and files between Hugging Face and megatron-core; process groups are in `megatron.weights`."""

from megatron_rft.conversion.folder import FolderWriter, HFFolder, load_config
from megatron_rft.conversion.mapping import Mapping, hf_shapes
from megatron_rft.conversion.shards import padded_vocab, partition_dim, shard, unshard
