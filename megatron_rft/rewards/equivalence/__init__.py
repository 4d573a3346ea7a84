"""Decides whether a final answer is equivalent to the reference, and no question in disguise (`judge` of math.py)."""
