"""Plug-ins: each takes an objective and gives back an objective."""
