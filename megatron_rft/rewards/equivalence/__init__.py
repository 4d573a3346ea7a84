"""Whether two final answers of mathematics mean the same.

latex      many ways to write an answer -> one spelling (text only)
rationals  numbers, read without algebra
structure  lists, sets, tuples, intervals, matrices, equations: compared part by part
algebra    the parts that need sympy
worker     all of it behind a pipe, with a time limit
"""
