"""The functions that a user calls."""
