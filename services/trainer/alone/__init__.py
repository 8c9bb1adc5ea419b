"""Parts of a run by themselves: training on steps that lie in files, and generation that nobody trains on.

In: files of rollout steps, or the ledger. Out: files of rollout steps, and what stands in for engines and ranks.
"""
