"""Decides whether a final answer of mathematics is equivalent to the reference, and no question in disguise.

tokens     cuts texts into tokens
trees      canonical trees
reader     reads tokens into trees: the one reader of references, answers and the questions' formulas
units      units of measure
values     values of trees at points
compare    compares two trees, part by part
disguise   the rule for what is no answer although it has the reference's value
judge      says whether an answer is right
"""
