"""The product's solver: which bounds and searches run when; least budgets and frontiers, made of the same parts."""
