"""Problem and answer: graph, schedule, simulator, validator, solution."""
