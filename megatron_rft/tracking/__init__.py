"""Logging: metrics files, the display on a terminal, wandb and TensorBoard. Knows no algorithms."""
