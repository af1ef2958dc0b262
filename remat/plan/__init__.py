"""Which plan a step gets: from memory, from disk, from another rank, or from a solver."""
