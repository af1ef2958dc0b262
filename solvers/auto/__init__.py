"""The product's solver: which bounds and searches run when.

Least budgets and frontiers, made of the same parts.
"""
