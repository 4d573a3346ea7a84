"""Errors, atomic writes, processes and user code. Imports nothing else of this package."""
