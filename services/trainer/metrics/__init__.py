"""Measures training: seconds, tokens a second, the distance between trainer and engines, named sums.

In: times and per-token figures of micro-batches. Out: numbers that ranks add up and rank 0 reports.
"""
