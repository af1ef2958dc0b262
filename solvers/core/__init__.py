"""What any method needs: the solver base class, a graph's arrays, the clock and Ctrl-C, compiled loops, and the incumbent."""
