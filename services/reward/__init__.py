"""The reward service: scores samples in worker processes, each sample by itself.

In: samples, their labels and the name of a scorer. Out: a score for each sample, or the error of that sample alone.
"""
