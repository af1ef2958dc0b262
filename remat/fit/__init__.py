"""Whether a training will fit: devices, optimizers, batch sizes."""
