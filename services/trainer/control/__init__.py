"""Rank 0 and the others: how ranks start, hear commands, notice each other's death, and publish weights together.

In: what the training loop asks for. Out: commands to all ranks, their answers, and transactions with the engines.
"""
