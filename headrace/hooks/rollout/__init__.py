"""Rollout functions: a user's function that makes all groups of a step, or a whole evaluation, as slime calls it.

In: its arguments, and a data source whose groups the rollout service leases. Out: groups of samples, each in its lease.
"""

from headrace.hooks.rollout.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput

__all__ = ["RolloutFnEvalOutput", "RolloutFnTrainOutput"]
