"""Reverb's samples-to-insert limiter beside the staleness rule: who waits, producers or the trainer.

With inserted groups that became READY, taken groups that were given to a batch, and

    difference = samples_per_insert * inserted - taken,

a batch of g groups is given only while READY >= min_size and difference - g >= samples_per_insert * min_size -
error_buffer; a group is handed to producers only while difference, counted as if all LEASED groups were in, stays at
or below samples_per_insert * min_size + error_buffer. A group is trained at most once here, so samples_per_insert is
at most 1; below 1 some groups are never taken and expire, or wait behind a prioritized selection. Without
samples_per_insert only the minimum size holds.

Expired groups have been inserted and can never be taken, and the staleness rule may hold producers back on its own. So
that no two rules together stop everything, producers are never held while fewer groups than a batch needs are READY
or LEASED, and a full batch is never held while no group may be leased and none is out.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Limiter:
    """The limits are counted in groups."""

    min_size: int = 1
    samples_per_insert: float | None = None
    error_buffer: float | None = None

    def check(self, groups_per_step: int) -> None:
        """Raises InvalidArgument when the limits contradict each other or a step's batch."""
        if self.min_size < 1:
            raise InvalidArgument(
                f"min_size_to_sample is {self.min_size}, must be at least 1", field="config.limiter.min_size_to_sample"
            )
        if (self.samples_per_insert is None) != (self.error_buffer is None):
            raise InvalidArgument(
                "samples_per_insert and error_buffer belong together: set both, or neither", field="config.limiter"
            )
        if self.samples_per_insert is None or self.error_buffer is None:
            return
        if not 0 < self.samples_per_insert <= 1:
            raise InvalidArgument(
                f"samples_per_insert is {self.samples_per_insert:g}, must be above 0 and at most 1: "
                "a group is trained once",
                field="config.limiter.samples_per_insert",
            )
        least = (groups_per_step + self.samples_per_insert) / 2
        if not self.error_buffer >= least:
            raise InvalidArgument(
                f"error_buffer {self.error_buffer:g} is smaller than {least:g}, half of a batch of {groups_per_step} "
                "groups and one insert: producers and trainer would wait for each other",
                field="config.limiter.error_buffer",
            )

    def inserts_left(self, *, num_inserted: int, num_taken: int, num_leased: int) -> int | None:
        """Counts the groups that producers may lease now; None without a limit."""
        if self.samples_per_insert is None or self.error_buffer is None:
            return None
        highest = self.samples_per_insert * self.min_size + self.error_buffer
        left = (highest + num_taken) / self.samples_per_insert - num_inserted - num_leased
        return max(int(left), 0)

    def may_take(self, count: int, *, num_inserted: int, num_taken: int, num_ready: int) -> bool:
        """True when a batch of `count` groups may be given now."""
        if num_ready < self.min_size:
            return False
        if self.samples_per_insert is None or self.error_buffer is None:
            return True
        lowest = self.samples_per_insert * self.min_size - self.error_buffer
        return self.samples_per_insert * num_inserted - num_taken - count >= lowest
