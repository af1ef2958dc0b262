"""The run on a GPU: steps, facts and tables of `python -m experiments.gpu_run`."""
