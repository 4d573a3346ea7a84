"""Generation: the engine protocol, the engine in this process, and the sampler that makes batches of groups.

Import what you need from its module: `engine` is light, `hf_engine` brings transformers.
"""
