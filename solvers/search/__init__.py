"""Upper bounds: sequences, annealing, eviction, neighbourhoods and recombination."""
