"""Describes samples that are not trained, and the reasons, in lines for a person."""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.limits import one_line
from headrace.trajectory import FILTERED

_REASONS_SHOWN = 3


def failures_line(production: pb.Production) -> str:
    """Counts and the most frequent reasons on one line; empty where nothing failed, was dropped or came back."""
    parts = []
    if production.num_failed:
        parts.append(f"{production.num_failed} of {production.num_samples} samples failed")
    if production.num_dropped:
        parts.append(f"{production.num_dropped} of {production.num_samples} samples dropped")
    if production.failures:
        shown = [f"{count.num_samples} {_reason(count)}" for count in production.failures[:_REASONS_SHOWN]]
        parts.append(f"most often {'; '.join(shown)}")
    if production.num_groups_returned:
        parts.append(f"{production.num_groups_returned} groups came back, the last: {one_line(production.last_return)}")
    return ", ".join(parts)


class FailureNotes:
    """Notes a reason when it is new, and again whenever its count has doubled."""

    def __init__(self) -> None:
        self._told: dict[str, int] = {}

    def lines(self, production: pb.Production) -> list[str]:
        """Returns the lines that are due now."""
        found = []
        for count in production.failures:
            if count.reason == FILTERED:  # no failure: the line of each step says what the filter dropped
                continue
            if count.num_samples < self._told.get(count.reason, 0):
                del self._told[count.reason]  # the buffer started again, and counts from 0
            if count.num_samples >= 2 * self._told.get(count.reason, 0):
                self._told[count.reason] = count.num_samples
                found.append(
                    f"{count.num_samples} of {production.num_samples} samples are not trained, {_reason(count)} "
                    f"(e.g. group {count.group_id})"
                )
        return found


def _reason(count: pb.FailureCount) -> str:
    return f"{one_line(count.reason)}: {one_line(count.example)}"
