"""The field's closed-form heuristics, one method per file."""
