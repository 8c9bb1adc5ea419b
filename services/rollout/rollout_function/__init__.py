"""A user's rollout function in the place of headrace's own generation: for whole steps, and for evaluations.

In: leased groups from the producer, each waiting for its samples. Out: their samples, or how each group ends without.
"""
