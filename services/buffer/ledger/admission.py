"""The staleness rule, in one place.

At step s the trainer holds weights of version s: they have seen s steps. A group trained at step s is
`s - oldest_version` steps behind, oldest_version being that of its oldest token, and it may be trained only while

    s - oldest_version <= max_staleness.

Producers are held back so that what they begin now will satisfy this when its turn comes. Batches take groups_per_step
groups, so the n-th admitted group is trained at step n // groups_per_step, and the version served now is the oldest it
can get. Therefore a group is handed out only while

    admitted < (max_staleness + min(step, policy_version) + 1) * groups_per_step
    admitted = step * groups_per_step + LEASED + READY.

plus over_sampling_groups, which are in production so that a step fills in spite of groups that are dropped: those left
over are trained later while they are fresh enough, and expire otherwise. What begins now can be trained up to step
max_staleness + min(step, policy_version): once all steps up to that one have their batches, none are begun beyond the
rule, as they could only expire, and producers are told of those that are out.

Dropped, failed, released and expired groups are in neither state: they give their place back. policy_version is
behind `step` between the end of a step and the publication of its weights: what began there would be a version older
than the plain `step` promises, so it has to wait for the publication. max_staleness = 0 with a publication after every
step is therefore exactly on-policy: a step's groups begin when its weights are served and are all consumed before the
next are.

Nothing deadlocks while step - policy_version <= max_staleness: then LEASED + READY may always reach groups_per_step.
A publication every k steps lets versions skip numbers and step - policy_version reach k - 1, so it needs
max_staleness >= k - 1; `services.buffer.build` refuses a job that has less.
"""

from __future__ import annotations

from collections.abc import Callable

from services.buffer.ledger.stream import StreamState


def slots_left(state: StreamState, num_leased: int, num_ready: int, has_batch: Callable[[int], bool]) -> int | None:
    """Counts the groups that may be leased now; None without admission control."""
    config = state.config
    if config.max_staleness is None:
        return None
    admitted = state.step * config.groups_per_step + num_leased + num_ready
    last_step = config.max_staleness + min(state.step, state.policy_version)
    limit = (last_step + 1) * config.groups_per_step
    if not all(map(has_batch, range(state.step, last_step + 1))):
        limit += config.over_sampling_groups
    return max(limit - admitted, 0)


def oldest_wanted(state: StreamState, has_batch: Callable[[int], bool]) -> int:
    """Returns the oldest version that some step without a batch may train; 0 when all may be trained."""
    if state.config.max_staleness is None:
        return 0
    step = state.step
    while has_batch(step):
        step += 1
    return max(step - state.config.max_staleness, 0)


def oldest_trainable(state: StreamState, step: int) -> int | None:
    """Returns the oldest policy version that may be trained at `step`; None when all may."""
    if state.config.max_staleness is None:
        return None
    return step - state.config.max_staleness
