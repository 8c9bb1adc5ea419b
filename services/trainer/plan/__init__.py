"""Cuts a step's batch: optimizer steps, data ranks, micro-batches, rows. Arithmetic only, the same on every rank.

In: the light facts of each sample (ids, lengths, versions, rewards). Out: which sample is computed where, in which row.
"""
