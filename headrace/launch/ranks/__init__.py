"""Starts a trainer's ranks: on this machine, as tasks of Slurm, or as Ray actors.

In: a command and a number of ranks. Out: that many processes, each with its rank, which end together.
"""
