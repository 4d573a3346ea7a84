"""One file a command of `megatron-rft`; `parser` says what each takes, `main` runs it."""
