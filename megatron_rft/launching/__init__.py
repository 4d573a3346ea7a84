"""Starts the ranks of a node and follows the jobs of a Slurm queue. No torch."""
