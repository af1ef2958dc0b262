"""What memory is made of, what becomes of each value, where it lies."""
