"""What memory is used for, which values are saved or recomputed, and their placement."""
