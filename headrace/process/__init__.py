"""Processes of this machine: parent-death signals, a guard that leaves nothing behind, threads for OpenMP.

In: a command line. Out: a process that ends together with its starter, children included. `workers/` run user code.
"""
