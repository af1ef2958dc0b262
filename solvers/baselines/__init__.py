"""The field's closed-form heuristics, one method a file."""
