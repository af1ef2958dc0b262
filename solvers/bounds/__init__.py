"""Lower bounds of the fixed order: the window model and what tightens it."""
