"""One file per command of `megatron-rft`. `parser` defines the arguments, `main` runs the command."""
