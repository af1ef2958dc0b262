"""Linear and integer programs from arrays: HiGHS, safe dual bounds, rounding cuts, minimum cuts."""
