"""Schedules that may leave the graph's order: for comparison, never run."""
