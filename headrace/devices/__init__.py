"""Gives GPUs to processes. In: a machine's devices, a job's counts. Out: those of the trainer and of each engine."""
