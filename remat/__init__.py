"""Train PyTorch models inside a memory budget, at provably near-minimal extra compute."""
