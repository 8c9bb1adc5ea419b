"""The sections of a job with their types, ranges and defaults, and what every value must be.

In: plain values. Out: frozen sections. What contradicts what is said in `rules/`.
"""
