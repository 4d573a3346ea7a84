"""The engine that generates with models of transformers, in the process of the rank."""
