"""The Checkmate MILP and its LP rounding: exact, for small graphs, and an oracle of the tests."""
