"""The states of traced groups as spans of their samples' traces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.rpc import tracing
from services.buffer.ledger.group import Group, GroupState
from services.buffer.ledger.ledger import Ledger
from services.buffer.ledger.state import LedgerEvent, Transaction

_ENDS = (GroupState.COMMITTED, GroupState.DROPPED, GroupState.FAILED)
_ERRORS = ("lease_expired", "failed")


@dataclass(slots=True)
class _Traced:
    traces: tracing.Contexts
    begun: float
    state: str = ""
    since: float = 0.0


class GroupSpans:
    """A span `headrace.STATE` for each state that a group has left, and at the end `headrace.sample` around them all.

    What was before this process started is not known, so that a span begins with the first event that it has seen.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._groups: dict[str, _Traced] = {}

    def add(self, transaction: Transaction) -> None:
        """Looks at a transaction's events, before it is durable."""
        if tracing.is_on():
            for event in transaction.events:
                if event.group_id is not None and event.state is not None:
                    self._add(event, transaction.groups[event.group_id], event.state)

    def _add(self, event: LedgerEvent, group: Group, state: GroupState) -> None:
        group_id = group.group_id
        known = self._groups.get(group_id)
        if known is None:
            num_samples = self._ledger.stream(event.stream).state.config.n_samples_per_prompt
            if not (traces := tracing.group(group_id, num_samples)):
                return
            known = self._groups[group_id] = _Traced(traces, event.unix_seconds)
        facts: dict[str, Any] = {"headrace.group": group_id, "headrace.leases": group.num_leases}
        facts |= {"headrace.ended_by": event.kind}
        facts |= {"headrace.detail": event.detail[:500]} if event.detail else {}
        facts |= {} if event.step is None else {tracing.STEP: event.step}
        if known.state:
            name = f"headrace.{known.state.lower()}"
            error = event.detail if event.kind in _ERRORS else None
            tracing.record(name, known.traces, known.since, event.unix_seconds, facts, error=error)
        is_batched = state is GroupState.READY and event.step is not None
        known.state, known.since = "batched" if is_batched else state.value, event.unix_seconds
        if state in _ENDS:
            del self._groups[group_id]
            tracing.record("headrace.sample", known.traces, known.begun, event.unix_seconds, facts, is_root=True)
