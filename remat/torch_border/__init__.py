"""Every private name of torch, by subject, with the version it was checked with; and fake copies of tensors."""
