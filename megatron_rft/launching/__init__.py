"""Starts the ranks of a node and handles restarts of Slurm jobs. Imports no torch."""
