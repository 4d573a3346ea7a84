"""Runs and judges untrusted programs in isolation from the machine and from the expected answers."""
