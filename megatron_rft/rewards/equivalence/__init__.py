"""Decides whether two final answers of mathematics are equivalent.

latex      normalises the many ways to write an answer (text only)
rationals  reads numbers without algebra
structure  compares lists, sets, tuples, intervals, matrices and equations part by part
algebra    compares the parts that need sympy
worker     runs all of it behind a pipe, with a time limit
"""
