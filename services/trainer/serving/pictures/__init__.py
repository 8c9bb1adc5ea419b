"""Pictures of a run: reward curves, evaluations, and where the time of a step goes.

In: rows of metrics. Out: PNG files.
"""
