"""The orders in which groups and leases wait: by age, by priority, by prompt source, by deadline, by last change.

In: groups as their state changes. Out: the next one, at a cost that does not grow with how many wait.
"""
