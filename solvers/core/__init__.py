"""What any method needs.

The solver base class, a graph's arrays, the clock and Ctrl-C, compiled loops, and the incumbent.
"""
