"""Every private name of torch, by subject, with the version it was checked with.

And fake copies of tensors.
"""
