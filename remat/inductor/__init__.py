"""Plans that Inductor runs: fused kernels, in the plan's order and within its budget."""
