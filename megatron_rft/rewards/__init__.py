"""Verifiers, which grade responses to problems. Imports nothing, because grading processes must not load torch."""
