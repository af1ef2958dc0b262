"""Schedules that may leave the graph's order: a number to compare with, never run."""
