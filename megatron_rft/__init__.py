"""megatron-rft: reinforcement fine-tuning of language models on megatron-core and vLLM."""

__version__ = "0.1.0"
