"""Replays a ledger's history and compares it with the ledger's state and with the trainer's record of every step.

Kinds of findings, the first three with a sample's id, the others with a sentence:

lost                         the ledger kept it or says a step used it, and it is in neither place
doubled                      it went into two steps of the run that lives on, or twice into one
unaccounted                  a step was fed with it and the ledger does not say so
record                       trained.jsonl: a line that is damaged, missing, repeated or out of order
order, digest                a step was fed its batch in another order, or under another digest
damage                       something on the buffer's disk is not as it was written, or contradicts something else
rerun                        a step was fed with other samples before a rewind than after it
history                      events that are missing, unknown, or of a stream that they do not fit
state                        a group that made a step it cannot make, or is not in the state that its events say
batch                        a step whose batch is not whole, or was used in part
epoch, version               a trainer's epoch or the policy's version that went back
count                        numbers of the ledger that do not add up
payload                      a sample whose payload is missing or damaged (only with --deep)
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.digest import batch_digest, batch_digest_of_0_1
from headrace.errors import NotFound


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence in `what`, or the sample's id when the kind is lost, doubled or unaccounted."""

    kind: str
    what: str


State: TypeAlias = pb.GroupState.ValueType

NOT_THERE = pb.GROUP_STATE_UNSPECIFIED
QUEUED = pb.GROUP_STATE_QUEUED
LEASED = pb.GROUP_STATE_LEASED
READY = pb.GROUP_STATE_READY
CONSUMED = pb.GROUP_STATE_CONSUMED
COMMITTED = pb.GROUP_STATE_COMMITTED
DROPPED = pb.GROUP_STATE_DROPPED
FAILED = pb.GROUP_STATE_FAILED


MOVES: Mapping[str, tuple[Sequence[State], Sequence[State]]] = {
    "submitted": ((NOT_THERE,), (QUEUED,)),
    "leased": ((QUEUED,), (LEASED,)),
    "released": ((LEASED,), (QUEUED,)),
    "lease_expired": ((LEASED,), (QUEUED,)),
    "failed": ((LEASED,), (QUEUED, FAILED)),
    "put": ((LEASED,), (READY,)),
    "dropped": ((QUEUED, LEASED, READY, FAILED), (DROPPED,)),
    "expired": ((READY,), (QUEUED, DROPPED)),
    "retried": ((FAILED,), (QUEUED,)),
    "batched": ((READY,), (READY,)),
    "unbatched": ((READY,), (READY,)),
    "consumed": ((READY,), (CONSUMED,)),
    "rewound": ((CONSUMED,), (READY,)),
    "committed": ((CONSUMED,), (COMMITTED,)),
}
"""From which states each kind of event goes, and to which. The ledger makes no others."""
STREAM_KINDS = frozenset(
    {"stream_created", "stream_deleted", "limits_changed", "policy_version", "rewound", "forgotten"}
)


def state_name(state: State) -> str:
    """The state without its prefix, for people."""
    if state == NOT_THERE:
        return "not there"
    if state not in pb.GroupState.values():
        return f"state {state}"
    return pb.GroupState.Name(state).removeprefix("GROUP_STATE_")


_BEGINNING = '{"step": '
_CUT_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{0,4})?$")
_SHOWN_CHARACTERS = 60


class RecordLine(msgspec.Struct, frozen=True):
    """One line, parsed. Lines are counted from 1."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    sample_ids: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    number: int = 0


_LINES = msgspec.json.Decoder(RecordLine)


@dataclass(frozen=True, slots=True)
class Record:
    """The lines that can be read, in order, and what is wrong with the others."""

    lines: Sequence[RecordLine] = ()
    findings: Sequence[Finding] = ()
    last_lines: Mapping[int, RecordLine] = field(init=False)
    """The last line of every step: of a step that was run again, the one whose weights live on."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "last_lines", {line.step: line for line in self.lines})


def parse_record(lines: Iterable[bytes]) -> Record:
    """A line that a kill has cut is passed over: its step was never consumed."""
    good: list[RecordLine] = []
    findings: list[Finding] = []
    for number, data in enumerate(lines, 1):
        text = data.decode(errors="replace").removesuffix("\n")
        if _is_torn(text):
            continue
        try:
            good.append(msgspec.structs.replace(_LINES.decode(text), number=number))
        except (msgspec.DecodeError, RecursionError) as error:
            what = f"line {number} is not as the trainer writes it ({error}): {text[:_SHOWN_CHARACTERS]!r}"
            findings.append(Finding("record", what))
    return Record(good, findings)


def read_record(path: Path) -> Record:
    """`parse_record` of a file. Raises NotFound."""
    if not path.is_file():
        raise NotFound(f"{path} does not exist: the trainer writes it with its first step, nothing was trained yet")
    with path.open("rb") as lines:
        return parse_record(lines)


def _is_torn(text: str) -> bool:
    """True when a kill may have left this: the beginning of a line as the trainer writes it, without its end."""
    if not text.strip("\0"):
        return True  # the file had grown, and its bytes had not reached the disk
    if len(text) < len(_BEGINNING):
        return _BEGINNING.startswith(text)
    if not text.startswith(_BEGINNING):
        return False
    text = _CUT_ESCAPE.sub("", text)
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text.rstrip(" ,")) or error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


Found = Callable[[str, pb.LedgerEvent, str], None]


@dataclass(slots=True)
class Epoch:
    """One trainer's: the step of its rewind, and what it consumed, in order."""

    number: int
    first_step: int
    consumed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Steps:
    """The trainer's side of a stream's history: epochs, batches, and what each step consumed.

    One command's events stand side by side: a batch is given whole, a step is consumed whole, and a rewind first takes
    every group back (or consumes what the trainer's checkpoint has passed) under its new epoch and then says so for the
    stream. A batch from which an operator drops a group is dissolved whole.
    """

    groups_per_step: int
    found: Found
    epoch: int = 0
    next_step: int = 0
    """Every step below it is consumed."""
    committed_step: int = 0
    """Every step below it is committed."""
    epochs: list[Epoch] = field(default_factory=list)
    batches: dict[int, list[str]] = field(default_factory=dict)
    """Step → its groups in training order."""
    used: dict[int, list[str]] = field(default_factory=dict)
    """Step → the groups that are CONSUMED or COMMITTED for it."""
    earlier: dict[int, list[tuple[str, ...]]] = field(default_factory=dict)
    """Step → the samples of batches that it had before a group was taken out of it."""
    twice: list[str] = field(default_factory=list)
    """Samples that two steps consumed."""
    _of: dict[str, int] = field(default_factory=dict)
    _dissolving: dict[int, pb.LedgerEvent] = field(default_factory=dict)
    """Step → the event with which the first group left its batch, while others may follow."""
    _rewinding: bool = False
    _last: pb.LedgerEvent | None = None
    """The last event of a batch that is being given, or of a step that is being consumed."""

    def step_of(self, group_id: str) -> int | None:
        return self._of.get(group_id)

    def before(self, event: pb.LedgerEvent) -> None:
        """Notes the epoch of any event, and the end of the command before it."""
        if self._last is not None and (event.kind, event.step) != (self._last.kind, self._last.step):
            self._end_step(self._last)
        if self._dissolving and event.kind not in ("dropped", "unbatched"):
            self._end_dissolving()
        if self._rewinding and event.kind not in ("consumed", "rewound"):
            self.found("epoch", event, f"is of epoch {event.epoch}, which no rewind has opened")
            self._rewinding = False
        if event.epoch < self.epoch:
            self.found("epoch", event, f"is of epoch {event.epoch}, after epoch {self.epoch} was opened")
        elif event.epoch > self.epoch:
            self.epoch, self._rewinding = event.epoch, event.kind in ("consumed", "rewound")
            if not self._rewinding:
                self.found("epoch", event, f"is of epoch {event.epoch}, which no rewind has opened")
                self.epochs.append(Epoch(event.epoch, self.next_step))

    def finish(self) -> None:
        if self._last is not None:
            self._end_step(self._last)
        self._end_dissolving()

    def batched(self, event: pb.LedgerEvent) -> None:
        if event.group_id in self._of:
            step = self._of[event.group_id]
            self.found("batch", event, f"gave group {event.group_id} to step {event.step}, step {step} has it")
            self.batches[step].remove(event.group_id)
        self.batches.setdefault(event.step, []).append(event.group_id)
        self._of[event.group_id] = event.step
        self._last = event

    def consumed(self, event: pb.LedgerEvent) -> None:
        """A step has used a group of its batch."""
        if self._of.get(event.group_id) != event.step:
            self.found("batch", event, f"consumed group {event.group_id} for step {event.step}, which has not got it")
        if any(event.group_id in self.used.get(step, ()) for step in {event.step, self._of.get(event.group_id, -1)}):
            self.twice.extend(event.sample_ids)
        if not self._rewinding and self._last is None and event.step != self.next_step:
            self.found("epoch", event, f"consumed step {event.step}, the next was {self.next_step}")
        self.used.setdefault(event.step, []).append(event.group_id)
        self._last = event

    def came_back(self, event: pb.LedgerEvent) -> None:
        """A rewind took a group back to its batch."""
        if not self._rewinding:
            self.found("epoch", event, f"took back group {event.group_id} without opening an epoch")
        used = self.used.get(event.step, [])
        if event.group_id in used:
            used.remove(event.group_id)

    def committed(self, event: pb.LedgerEvent) -> None:
        """A checkpoint covers a group."""
        if event.group_id not in self.used.get(event.step, ()):
            self.found("state", event, f"committed group {event.group_id}, which step {event.step} never consumed")
        self.committed_step = max(self.committed_step, event.step + 1)

    def rewound(self, event: pb.LedgerEvent) -> None:
        if not self._rewinding and self.epochs and self.epochs[-1].number == event.epoch:
            self.found("epoch", event, f"opened epoch {event.epoch}, which was open")
        self._rewinding = False
        kept = [group_id for step, used in self.used.items() if step >= event.step for group_id in used]
        if kept:
            self.found("batch", event, f"went back to step {event.step} and left the groups {kept} consumed")
        if event.step < self.committed_step:
            self.found("epoch", event, f"went back to step {event.step}, {self.committed_step} is committed")
        self.epochs.append(Epoch(event.epoch, event.step))
        self.next_step = event.step

    def leaves(self, event: pb.LedgerEvent, samples_of: Callable[[Sequence[str]], tuple[str, ...]]) -> None:
        """A group is READY no more; if a step had it, the step's batch is dissolved."""
        step = self._of.pop(event.group_id, None)
        if step is None:
            return
        if step not in self._dissolving:
            self.earlier.setdefault(step, []).append(samples_of(self.batches[step]))
            self._dissolving[step] = event
        self.batches[step].remove(event.group_id)
        used = self.used.get(step, [])
        if event.group_id in used:
            used.remove(event.group_id)

    def unbatched(self, event: pb.LedgerEvent, samples_of: Callable[[Sequence[str]], tuple[str, ...]]) -> None:
        """A group is READY and belongs to no step any more."""
        if self._of.get(event.group_id) != event.step or event.step not in self._dissolving:
            what = f"took group {event.group_id} out of the batch of step {event.step}"
            self.found("batch", event, f"{what}, from which no group was dropped")
        self.leaves(event, samples_of)

    def _end_dissolving(self) -> None:
        for step, event in self._dissolving.items():
            if left := self.batches[step]:
                self.found("batch", event, f"took a group out of the batch of step {step} and left the groups {left}")
        self._dissolving.clear()

    def _end_step(self, event: pb.LedgerEvent) -> None:
        self._last = None
        batch, used, step = self.batches.get(event.step, []), self.used.get(event.step, []), event.step
        if event.kind == "batched":
            if len(batch) != self.groups_per_step:
                what = f"left step {step} with {len(batch)} groups, a batch has {self.groups_per_step}"
                self.found("batch", event, what)
            return
        if batch != used:
            self.found("batch", event, f"ended step {step} with the groups {used}, its batch has {batch}")
        if self._rewinding:
            return  # the trainer's checkpoint has it: it was fed in another epoch
        self.next_step = step + 1
        if self.epochs:
            self.epochs[-1].consumed.append(step)


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
    """One stream of one buffer, fed with its events in the order of their positions; `finish` comes last.

    A group with samples is held (READY, CONSUMED, COMMITTED) or given up (any event that takes it back to work or out
    of it). An event that cannot follow those before it is a finding. After that it is applied, so that one fault is
    reported once.
    """

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
        self.steps.finish()
        if not self._limits_changed:
            self.findings += self._stale

    def counts(self) -> dict[State, int]:
        """Groups in each state, forgotten ones included."""
        return Counter(group.state for group in self.groups.values())

    def samples_of(self, group_ids: Sequence[str]) -> tuple[str, ...]:
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
        before, after = MOVES.get(event.kind, ((), ()))
        if event.kind not in MOVES:
            self._found("history", event, f"is of the unknown kind {event.kind!r}, of group {group.group_id}")
        elif group.is_forgotten:
            self._found("state", event, f"{event.kind} group {group.group_id}, which was forgotten")
        elif group.state not in before or event.state not in after:
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


@dataclass(frozen=True, slots=True)
class AuditedLedger:
    """The state of one buffer: one shard of a ledger, or all of it."""

    replay: Replay
    position: int
    """The position up to which the history was read."""
    groups: Mapping[str, pb.Group]
    stats: pb.StreamStats | None
    """None where the ledger has moved since `position`."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A line that has to be there."""

    epoch: int
    step: int


def compare_lines(ledgers: Sequence[AuditedLedger], record: Record, num_lines_before: int) -> Iterator[Finding]:
    """The order of the trainer's lines against the ledger's epochs.

    A trainer writes a step's line before it tells the ledger that the step is consumed. So each epoch has a line for
    every step that it consumed, in their order, and may have one more, of the step after those: a kill, or a newer
    trainer, came between the line and the ledger. An older trainer that does not know of the newer one writes that
    line late. Lines after the first `num_lines_before` may be newer than the history, and are passed over at the end.
    """
    wanted, late = _expected(ledgers)
    spare: Counter[int] = Counter()
    at = 0
    for i, line in enumerate(record.lines):
        spare.update(late.pop(at, ()))
        if at < len(wanted) and line.step == wanted[at].step:
            at += 1
        elif spare[line.step]:
            spare[line.step] -= 1
        elif at == len(wanted):
            if i < num_lines_before:
                yield _found(line, f"after step {wanted[-1].step}, the last that was consumed" if wanted else "first")
        elif (end := _resumed(wanted, at, line, record.lines[i + 1 : i + 2])) is None:
            yield _found(line, f"where epoch {wanted[at].epoch} consumed step {wanted[at].step} next")
        else:
            for missing in wanted[at:end]:
                yield _missing(missing, f" before line {line.number}")
            for passed in range(at + 1, end + 1):
                spare.update(late.pop(passed, ()))
            at = end + 1
    for missing in wanted[at:]:
        yield _missing(missing, "")


def _expected(ledgers: Sequence[AuditedLedger]) -> tuple[list[_Wanted], dict[int, list[int]]]:
    """The lines in order; and after how many of them there may be a further one, of which step."""
    consumed: dict[int, set[int]] = {}
    first: dict[int, int] = {}
    for ledger in ledgers:
        for epoch in ledger.replay.steps.epochs:
            consumed.setdefault(epoch.number, set()).update(epoch.consumed)
            first.setdefault(epoch.number, epoch.first_step)
    wanted: list[_Wanted] = []
    late: dict[int, list[int]] = {}
    for number in sorted(consumed):
        wanted += [_Wanted(number, step) for step in sorted(consumed[number])]
        late.setdefault(len(wanted), []).append(max(consumed[number], default=first[number] - 1) + 1)
    return wanted, late


def _resumed(wanted: Sequence[_Wanted], at: int, line: RecordLine, following: Sequence[RecordLine]) -> int | None:
    """The index at which the line is expected if those before it are missing; None when the line itself is surplus."""
    if following and following[0].step == wanted[at].step:
        return None
    return next((i for i in range(at + 1, len(wanted)) if wanted[i].step == line.step), None)


def _found(line: RecordLine, where: str) -> Finding:
    return Finding("record", f"line {line.number} feeds step {line.step} {where}")


def _missing(wanted: _Wanted, where: str) -> Finding:
    return Finding("record", f"has no line of step {wanted.step}, which epoch {wanted.epoch} consumed{where}")


def compare(ledger: AuditedLedger) -> Iterator[Finding]:
    """Groups that changed after the history was read are passed over."""
    for story in ledger.replay.groups.values():
        yield from _compare_group(ledger, story)
    for group in ledger.groups.values():
        if group.group_id not in ledger.replay.groups and group.position <= ledger.position:
            yield Finding("state", f"group {group.group_id} is in the ledger and no event made it")
        if ledger.stats is not None and group.position > ledger.position:
            yield Finding("history", f"has no event at position {group.position}, where group {group.group_id} changed")
    if ledger.stats is not None:
        yield from _compare_counts(ledger, ledger.stats)


def _compare_group(ledger: AuditedLedger, story: GroupStory) -> Iterator[Finding]:
    group = ledger.groups.get(story.group_id)
    if story.is_forgotten:
        return
    if group is None:
        if story.sample_ids:
            yield from (Finding("lost", sample_id) for sample_id in story.sample_ids)
        else:
            state = state_name(story.state)
            yield Finding("state", f"group {story.group_id} is {state} by its events and not in the ledger")
        return
    if group.position > ledger.position:
        return
    if (group.state, group.position) != (story.state, story.position):
        yield Finding(
            "state",
            f"group {story.group_id} is {state_name(group.state)} since position {group.position} in the ledger, "
            f"by its events {state_name(story.state)} since {story.position}",
        )
    shown = [sample.sample_id for sample in group.samples]
    yield from (Finding("lost", sample_id) for sample_id in story.sample_ids if sample_id not in shown)
    if set(shown) >= set(story.sample_ids) and tuple(shown) != tuple(story.sample_ids):
        what = f"group {story.group_id} shows the samples {shown}, it was put with {list(story.sample_ids)}"
        yield Finding("state", what)
    yield from _compare_step(ledger, group)


def _compare_step(ledger: AuditedLedger, group: pb.Group) -> Iterator[Finding]:
    by_events = ledger.replay.steps.step_of(group.group_id)
    shown = group.step if group.HasField("step") else None
    if by_events != shown:
        yield Finding("batch", f"group {group.group_id} is of step {shown} in the ledger, of {by_events} by its events")
    elif shown is not None and group.HasField("batch_index"):
        place = ledger.replay.steps.batches[shown].index(group.group_id)
        if place != group.batch_index:
            yield Finding(
                "order",
                f"group {group.group_id} is number {group.batch_index} of step {shown}'s batch in the ledger, "
                f"{place} by its events",
            )


def _compare_counts(ledger: AuditedLedger, stats: pb.StreamStats) -> Iterator[Finding]:
    replay, steps = ledger.replay, ledger.replay.steps
    counts = {state_name(state): number for state, number in replay.counts().items() if number}
    shown = {name: number for name, number in stats.groups.items() if number}
    if counts != shown:
        yield Finding("count", f"the ledger counts the groups {_sorted(shown)}, its events {_sorted(counts)}")
    for name, of_events, of_ledger in (
        ("epoch", steps.epoch, stats.epoch),
        ("next step", steps.next_step, stats.step),
        ("policy version", replay.policy_version, stats.policy_version),
    ):
        if of_events != of_ledger:
            yield Finding("count", f"the {name} is {of_ledger} in the ledger, {of_events} by its events")
    for step, used in steps.used.items():
        for group_id in used:
            state = replay.groups[group_id].state
            if state == CONSUMED and step < stats.committed_step:
                yield Finding("count", f"step {step} is committed, and its group {group_id} is CONSUMED still")
            elif state == COMMITTED and step >= stats.committed_step:
                yield Finding("count", f"group {group_id} of step {step} is COMMITTED, the step is not")


def _sorted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items())) or "none"


_FEW_SHARDS = 8


def compare_batch(ledgers: Sequence[AuditedLedger], line: RecordLine) -> Iterator[Finding]:
    """The line whose weights live on; also of a step that a kill kept the trainer from consuming: it has its batch."""
    batch = [sample_id for ledger in ledgers for sample_id in _samples(ledger, line.step)]
    if list(line.sample_ids) == batch:
        yield from _compare_digest(ledgers, line)
        return
    yield from (Finding("unaccounted", sample_id) for sample_id in line.sample_ids if sample_id not in batch)
    if missing := [sample_id for sample_id in batch if sample_id not in line.sample_ids]:
        yield Finding("batch", f"of step {line.step} was fed without {missing} (line {line.number})")
    elif sorted(line.sample_ids) == sorted(batch):
        place = next(i for i, pair in enumerate(zip(line.sample_ids, batch, strict=True)) if pair[0] != pair[1])
        yield Finding(
            "order",
            f"line {line.number} feeds step {line.step} its batch in another order: sample {place} is "
            f"{line.sample_ids[place]}, in the ledger {batch[place]}",
        )


def is_superseded(ledgers: Sequence[AuditedLedger], line: RecordLine) -> bool:
    """It feeds what was the step's batch until an operator dropped a group of it, and no step has consumed since."""
    every = [ledger.replay.steps for ledger in ledgers]
    if any(steps.used.get(line.step) for steps in every):
        return False
    has_changed = any(line.step in steps.earlier for steps in every)
    parts = [(_part(ledger, line), ledger) for ledger in ledgers]
    return (
        has_changed
        and any(part != _samples(ledger, line.step) for part, ledger in parts)
        and all(part in _versions(ledger, line.step) for part, ledger in parts)
    )


def compare_rerun(ledgers: Sequence[AuditedLedger], line: RecordLine, last: RecordLine) -> Iterator[Finding]:
    """A line of a step that was run again later: with the same data, unless groups were taken out of its batch."""
    if line.sample_ids == last.sample_ids:
        digests = _digests(ledgers, line.step)
        if line.digest != last.digest and digests is not None and not {line.digest, last.digest} <= digests:
            what = f"lines {line.number} and {last.number} feed step {line.step} the same samples"
            yield Finding("digest", f"{what} as {line.digest[:16]}… and {last.digest[:16]}…")
        return
    if all(_part(ledger, line) in _versions(ledger, line.step) for ledger in ledgers):
        return
    only = [[each for each in a.sample_ids if each not in b.sample_ids] for a, b in ((line, last), (last, line))]
    yield Finding(
        "rerun",
        f"step {line.step} was fed other samples before it was run again: line {line.number} has {only[0]}, "
        f"line {last.number} has {only[1]}" + ("" if any(only) else ", in another order"),
    )


def _compare_digest(ledgers: Sequence[AuditedLedger], line: RecordLine) -> Iterator[Finding]:
    digests = _digests(ledgers, line.step)
    if digests is not None and line.digest not in digests:
        yield Finding(
            "digest",
            f"line {line.number} feeds step {line.step} the batch {line.digest[:16]}…, in the ledger its samples, "
            f"rewards and policy versions give {min(digests)[:16]}…",
        )


def _digests(ledgers: Sequence[AuditedLedger], step: int) -> set[str] | None:
    """Computes the digests that LeaseBatch may have answered; None where a group is forgotten.

    While shards were upgraded, each may have been of either release.
    """
    parts = [_digests_of_shard(ledger, step) for ledger in ledgers]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    if len(known) == 1:
        return {digest.hex() for digest in known[0]}
    mixed = product(*known) if len(known) <= _FEW_SHARDS else zip(*known, strict=False)
    return {hashlib.sha256(b"".join(part)).hexdigest() for part in mixed}


def _digests_of_shard(ledger: AuditedLedger, step: int) -> list[bytes] | None:
    group_ids = ledger.replay.steps.batches.get(step, ())
    if any(group_id not in ledger.groups for group_id in group_ids):
        return None
    groups = [ledger.groups[group_id] for group_id in group_ids]
    of_0_1 = batch_digest_of_0_1((group.group_id, [each.digest for each in group.samples]) for group in groups)
    return [batch_digest(group.digest for group in groups), of_0_1]


def _samples(ledger: AuditedLedger, step: int) -> tuple[str, ...]:
    return ledger.replay.samples_of(ledger.replay.steps.batches.get(step, ()))


def _part(ledger: AuditedLedger, line: RecordLine) -> tuple[str, ...]:
    return tuple(sample_id for sample_id in line.sample_ids if sample_id in ledger.replay.home)


def _versions(ledger: AuditedLedger, step: int) -> Sequence[tuple[str, ...]]:
    return [_samples(ledger, step), *ledger.replay.steps.earlier.get(step, ())]


_SAMPLE_KINDS = ("lost", "doubled", "unaccounted")


@dataclass(frozen=True, slots=True)
class AuditVerdict:
    """Sample ids, sorted; and sentences."""

    lost: Sequence[str]
    doubled: Sequence[str]
    unaccounted: Sequence[str]
    others: Sequence[Finding] = ()

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.unaccounted or self.others)


def verdict_of(
    ledgers: Sequence[AuditedLedger],
    record: Record,
    *,
    num_lines_before: int | None = None,
    found: Iterable[Finding] = (),
) -> AuditVerdict:
    """The ledgers are the shards, in their order; `found` is what was found before.

    The record was read after the ledgers; `num_lines_before` lines of it were there before them (None: all).
    """
    num_lines_before = len(record.lines) if num_lines_before is None else num_lines_before
    next_step = min(ledger.replay.steps.next_step for ledger in ledgers)
    known = Record([each for i, each in enumerate(record.lines) if i < num_lines_before or each.step < next_step])
    findings = [*found, *record.findings, *compare_lines(ledgers, record, num_lines_before)]
    for ledger in ledgers:
        findings += [*ledger.replay.findings, *compare(ledger), *_not_fed(ledger, known)]
        findings += [Finding("doubled", sample_id) for sample_id in ledger.replay.steps.twice]
    living = {step: line for step, line in known.last_lines.items() if not is_superseded(ledgers, line)}
    for line in known.lines:
        last = known.last_lines[line.step]
        if line is not last:
            findings += compare_rerun(ledgers, line, last)
        elif line.step in living:
            findings += compare_batch(ledgers, line)
    times = Counter(sample_id for line in living.values() for sample_id in line.sample_ids)
    findings += [Finding("doubled", sample_id) for sample_id, count in times.items() if count > 1]
    ids = {kind: sorted({each.what for each in findings if each.kind == kind}) for kind in _SAMPLE_KINDS}
    others = list(dict.fromkeys(each for each in findings if each.kind not in _SAMPLE_KINDS))
    return AuditVerdict(ids["lost"], ids["doubled"], ids["unaccounted"], others)


def _not_fed(ledger: AuditedLedger, record: Record) -> Iterator[Finding]:
    for step, group_ids in ledger.replay.steps.used.items():
        fed = set(record.last_lines[step].sample_ids) if step in record.last_lines else set()
        for sample_id in ledger.replay.samples_of(group_ids):
            if sample_id not in fed:
                yield Finding("lost", sample_id)
