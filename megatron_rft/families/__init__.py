"""What the model families have: names, shapes and limits. No torch."""
