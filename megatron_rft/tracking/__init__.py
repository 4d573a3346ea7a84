"""Logs metrics to files, a terminal display and wandb."""
