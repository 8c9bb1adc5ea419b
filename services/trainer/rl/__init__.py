"""Reinforcement learning by the job's choice: from rewards to advantages, and from log-probs to a loss.

In: a micro-batch's log-probs, rewards and masks, and users' functions. Out: the loss of each token and its statistics.
The formulas are in `algorithms/`, one paper a file.
"""
