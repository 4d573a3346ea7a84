"""Plug-ins: each wraps an objective and is itself an objective."""
