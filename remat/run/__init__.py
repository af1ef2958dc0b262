"""From a captured step to two functions that run a schedule."""
