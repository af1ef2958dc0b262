"""The default solver, `auto`: which bounds and searches run when.

Least budgets and frontiers are built from the same parts.
"""
