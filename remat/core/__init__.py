"""The problem and its answer: graph, schedule, simulator, validator, solution."""
