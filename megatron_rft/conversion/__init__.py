"""Converts names, shapes and files between Hugging Face and megatron-core; process groups are in `megatron.weights`."""

from megatron_rft.conversion.folder import FolderWriter, HFFolder, language_config, load_config
from megatron_rft.conversion.mapping import Mapping, padded_vocab, shard, unshard
from megatron_rft.families.shapes import hf_shapes, partition_dim
