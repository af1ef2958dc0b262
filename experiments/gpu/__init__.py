"""Steps, facts and tables of the GPU run, `python -m experiments.gpu_run`."""
