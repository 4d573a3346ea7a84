"""Sends tensors to an engine in another process, in buckets, through shared memory or a network."""
