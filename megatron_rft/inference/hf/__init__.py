"""The engine on transformers' models, in the process of the rank."""
