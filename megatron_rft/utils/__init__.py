"""Errors, atomic writes, processes and user code. Imports no other part of this package."""
