"""The vLLM engine: in a rank, in a process of its own, or behind a server."""
