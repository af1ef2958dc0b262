"""Whether training will fit on a device: models, optimizers, batch sizes."""
