"""Checkpoints: a folder for each step, with a file of every rank and a manifest that is written last.

In: the named parts of a training state. Out: durable folders, read back under any layout of ranks.
"""
