"""The ledger's events, replayed: where every group is, which batch every step has, and what cannot have happened.

A group with samples is held (READY, CONSUMED, COMMITTED) or given up (any event that takes it back to work or out of
it). An event that cannot follow those before it is a finding; then its word is taken, so that one fault is told once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.ledger_tools.audit.events import (
    COMMITTED,
    CONSUMED,
    DROPPED,
    MOVES,
    NOT_THERE,
    READY,
    STREAM_KINDS,
    State,
    state_name,
)
from headrace.ledger_tools.audit.finding import Finding
from headrace.ledger_tools.audit.steps import Steps

_HELD = frozenset({READY, CONSUMED, COMMITTED})
_ENDED = frozenset({COMMITTED, DROPPED})


@dataclass(slots=True)
class GroupStory:
    """The state of a group so far."""

    group_id: str
    state: State = NOT_THERE
    sample_ids: Sequence[str] = ()
    position: int = 0
    is_forgotten: bool = False


@dataclass(slots=True)
class Replay:
    """One stream of one buffer, fed with its events in the order of their positions; `finish` comes last."""

    config: pb.StreamConfig
    groups: dict[str, GroupStory] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)
    """Sample → the group that it was put for."""
    given_up: set[str] = field(default_factory=set)
    findings: list[Finding] = field(default_factory=list)
    policy_version: int = 0
    num_events: int = 0
    steps: Steps = field(init=False)
    _policy_epoch: int = 0
    _limits_changed: bool = False
    _stale: list[Finding] = field(default_factory=list)
    _ended_at: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.steps = Steps(self.config.groups_per_step, self._found)

    def add(self, event: pb.LedgerEvent) -> None:
        """The stream's next event."""
        self.num_events += 1
        self.steps.before(event)
        if event.group_id:
            self._add_to_group(event)
        else:
            self._add_to_stream(event)

    def finish(self) -> None:
        """There are no more events."""
        self.steps.finish()
        if not self._limits_changed:
            self.findings += self._stale

    def counts(self) -> dict[State, int]:
        """Groups in each state, forgotten ones included."""
        counts: dict[State, int] = defaultdict(int)
        for group in self.groups.values():
            counts[group.state] += 1
        return counts

    def samples_of(self, group_ids: Sequence[str]) -> tuple[str, ...]:
        """The samples of these groups, in order."""
        return tuple(each for group_id in group_ids for each in self.groups[group_id].sample_ids)

    def _add_to_group(self, event: pb.LedgerEvent) -> None:
        group = self.groups.setdefault(event.group_id, GroupStory(event.group_id))
        self._check_move(event, group)
        match event.kind:
            case "put":
                self._put(event, group)
            case "batched":
                self._check_fresh(event)
                self.steps.batched(event)
            case "unbatched":
                self.steps.unbatched(event, self.samples_of)
            case "consumed":
                self._check_samples(event, group)
                self.steps.consumed(event)
            case "rewound":
                self.steps.came_back(event)
            case "committed":
                self.steps.committed(event)
        if event.state not in _HELD:
            self.steps.leaves(event, self.samples_of)
            self.given_up.update(group.sample_ids)
            group.sample_ids = ()
        if event.state in _ENDED:
            self._ended_at[event.step].append(group.group_id)
        group.state, group.position = event.state, event.position

    def _check_move(self, event: pb.LedgerEvent, group: GroupStory) -> None:
        move = MOVES.get(event.kind)
        if move is None:
            self._found("history", event, f"is of the unknown kind {event.kind!r}, of group {group.group_id}")
        elif group.is_forgotten:
            self._found("state", event, f"{event.kind} group {group.group_id}, which was forgotten")
        elif group.state not in move.before or event.state not in move.after:
            ways = f"from {state_name(group.state)} to {state_name(event.state)}"
            self._found("state", event, f"{event.kind} took group {group.group_id} {ways}")

    def _put(self, event: pb.LedgerEvent, group: GroupStory) -> None:
        group.sample_ids = tuple(event.sample_ids)
        self.given_up.difference_update(group.sample_ids)
        if len(group.sample_ids) < self.config.n_samples_per_prompt:
            wanted = self.config.n_samples_per_prompt
            self._found("count", event, f"put {len(group.sample_ids)} samples of {wanted} for group {group.group_id}")
        for sample_id in group.sample_ids:
            if self.home.setdefault(sample_id, group.group_id) != group.group_id:
                self._found("state", event, f"put sample {sample_id} of {self.home[sample_id]} for {group.group_id}")
        if len(set(group.sample_ids)) < len(group.sample_ids):
            self._found("state", event, f"put a sample twice for group {group.group_id}: {list(group.sample_ids)}")

    def _check_samples(self, event: pb.LedgerEvent, group: GroupStory) -> None:
        if tuple(event.sample_ids) != group.sample_ids:
            self._found(
                "batch",
                event,
                f"consumed the samples {list(event.sample_ids)} of group {group.group_id}, "
                f"which was put with {list(group.sample_ids)}",
            )

    def _check_fresh(self, event: pb.LedgerEvent) -> None:
        """The limit of staleness may change, and events do not say to what: then this is not checked."""
        if not self.config.HasField("max_staleness"):
            return
        oldest = event.step - self.config.max_staleness
        if event.policy_version < oldest:
            what = f"gave group {event.group_id} of version {event.policy_version} to step {event.step}"
            self._stale.append(Finding("version", f"position {event.position} {what}, which takes {oldest} or newer"))

    def _add_to_stream(self, event: pb.LedgerEvent) -> None:
        match event.kind:
            case "policy_version":
                self._set_version(event)
            case "rewound":
                self.steps.rewound(event)
            case "forgotten":
                self._forget(event)
            case "limits_changed":
                self._limits_changed = True
            case "stream_created" if self.num_events > 1:
                self._found("history", event, "created the stream, which was there")
        if event.kind not in STREAM_KINDS:
            self._found("history", event, f"is of the unknown kind {event.kind!r}")
        elif event.HasField("policy_version") and event.policy_version != self.policy_version:
            self._found("version", event, f"shows version {event.policy_version}, {self.policy_version} was set")

    def _set_version(self, event: pb.LedgerEvent) -> None:
        if event.policy_version < self.policy_version and event.epoch == self._policy_epoch:
            self._found("version", event, f"set version {event.policy_version} after {self.policy_version}")
        self.policy_version, self._policy_epoch = event.policy_version, event.epoch

    def _forget(self, event: pb.LedgerEvent) -> None:
        for step in [step for step in self._ended_at if step < event.step]:
            for group_id in self._ended_at.pop(step):
                self.groups[group_id].is_forgotten = True

    def forget_since(self, event: pb.LedgerEvent, missing: Sequence[str]) -> None:
        """A later event than those that were added: those of the missing groups whose step it reaches are forgotten."""
        for group_id in missing:
            step = self.steps.step_of(group_id)
            if step is not None and step < event.step:
                self.groups[group_id].is_forgotten = True

    def _found(self, kind: str, event: pb.LedgerEvent, what: str) -> None:
        self.findings.append(Finding(kind, f"position {event.position} {what}"))
