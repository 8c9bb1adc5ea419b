"""The ledger's events, replayed: which samples it holds for which group, and which step has consumed them.

put → held; any event that takes the group back to work (expired, requeued, dropped) → no longer held;
consumed → of its step; rewound → held again. Committed samples stay known: their payloads may be gone, their story not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.api.buffer.v1 import buffer_pb2 as pb

_HOLDING = frozenset({pb.GROUP_STATE_READY, pb.GROUP_STATE_CONSUMED, pb.GROUP_STATE_COMMITTED})


class History:
    """Fed with events in the order of their positions."""

    def __init__(self) -> None:
        self.position = 0
        self.epoch = 0
        self.held: dict[str, tuple[str, ...]] = {}
        self.batched: dict[str, int] = {}
        self.committed: set[str] = set()
        self.put: set[str] = set()
        self.given_up: set[str] = set()
        self.consumed_twice: list[str] = []
        self._consumed: dict[str, tuple[int, tuple[str, ...]]] = {}

    def add(self, event: pb.LedgerEvent) -> None:
        """The next event."""
        self.position = event.position
        self.epoch = max(self.epoch, event.epoch)
        if event.group_id:
            self._add_to_group(event)

    def _add_to_group(self, event: pb.LedgerEvent) -> None:
        group_id = event.group_id
        if event.state not in _HOLDING:
            self.given_up.update(self.held.pop(group_id, ()))
        match event.kind:
            case "put":
                self.held[group_id] = tuple(event.sample_ids)
                self.put.update(event.sample_ids)
            case "batched":
                self.batched[group_id] = event.step
            case "consumed":
                if group_id in self._consumed:
                    self.consumed_twice.extend(event.sample_ids)
                self._consumed[group_id] = (event.step, tuple(event.sample_ids))
            case "rewound":
                self._consumed.pop(group_id, None)
            case "committed":
                self.committed.add(group_id)

    @property
    def next_step(self) -> int:
        """Every step below it is consumed."""
        return max((step for step, _ in self._consumed.values()), default=-1) + 1

    def consumed(self) -> Mapping[int, Sequence[str]]:
        """Step → the samples that the ledger says it used, after every rewind."""
        steps: dict[int, list[str]] = {}
        for step, sample_ids in self._consumed.values():
            steps.setdefault(step, []).extend(sample_ids)
        return steps
