"""The offline methods."""
