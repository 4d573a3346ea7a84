"""Logs metrics to files, a terminal display, wandb and TensorBoard."""
