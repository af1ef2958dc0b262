"""Exhaustive search over what is in memory: optimum and least budget of small graphs."""
