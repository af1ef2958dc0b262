"""Whether a training will fit on a device: models, optimizers, batch sizes."""
