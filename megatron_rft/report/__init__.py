"""Reports on runs: a self-contained HTML page, and the state in a few lines. Imports no torch."""
