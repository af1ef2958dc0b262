"""What memory is used for, which values a schedule saves or recomputes, and their placement."""
