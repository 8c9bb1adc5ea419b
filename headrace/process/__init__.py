"""Processes of this machine: a guard that leaves nothing behind, their logs, the body of a service, threads for OpenMP.

In: a command line. Out: a process that ends together with its starter, children included. `workers/` run user code.
"""
