"""All uses of private names of torch, by subject; and fake copies of tensors."""
