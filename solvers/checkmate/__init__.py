"""The Checkmate MILP and its LP rounding: for small graphs, and an oracle for the tests."""
