"""The sections of a job with their types, ranges and defaults, and the checks of single values.

In: plain values. Out: frozen sections. Contradictions between values are found in `rules/`.
"""
