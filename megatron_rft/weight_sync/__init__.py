"""From the actor's stream of HF-named tensors into a generation engine, with the proof that they arrived."""

from megatron_rft.weight_sync.push import push as push
