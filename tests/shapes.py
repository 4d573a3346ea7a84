"""Sizes of models that several tests share, for configurations of transformers."""

SMALL = dict(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
# Small, with sizes that the kernels of Transformer Engine and vLLM take.
FOR_KERNELS = SMALL | dict(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    head_dim=64,
    max_position_embeddings=2048,
    eos_token_id=0,
    bos_token_id=None,
    pad_token_id=None,
)
