"""How tensors reach an engine in another process: buckets over shared memory or a network."""
