"""The rollout services as rank 0 sees them: by their number in the job, several on one ledger or only one.

In: calls to all of them. Out: what those answered that go on, and why others were left.
"""
