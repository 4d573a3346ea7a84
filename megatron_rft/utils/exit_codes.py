"""Exit statuses of every command, every rank, and every job of a queue (docs/troubleshooting.md)."""

FINISHED = 0
USER_ERROR = 2
"""Some input of the user is wrong; running the same command again gives the same error."""
FAILED = 3
"""The run failed: a killed rank, a numerical failure, a full disk."""
STOPPED = 75
"""Stopped after a checkpoint; the same command continues from there (EX_TEMPFAIL of sysexits.h)."""
