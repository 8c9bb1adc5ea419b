"""The trainer's side of a stream's history: epochs, batches, and what each step consumed.

One command's events stand side by side: a batch is given whole, a step is consumed whole, and a rewind first takes
every group back (or consumes what the trainer's checkpoint has passed) under its new epoch and then says so for the
stream. A batch from which an operator drops a group is dissolved whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.api.buffer.v1 import buffer_pb2 as pb

Found = Callable[[str, pb.LedgerEvent, str], None]


@dataclass(slots=True)
class Epoch:
    """One trainer's: the step of its rewind, and what it consumed, in order."""

    number: int
    first_step: int
    consumed: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Steps:
    """Part of a `Replay`."""

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
    _giving: tuple[int, pb.LedgerEvent] | None = None
    _consuming: tuple[int, pb.LedgerEvent] | None = None

    def step_of(self, group_id: str) -> int | None:
        """The step that has the group in its batch."""
        return self._of.get(group_id)

    def before(self, event: pb.LedgerEvent) -> None:
        """Notes the epoch of any event, and the end of the command before it."""
        if self._giving and (event.kind, event.step) != ("batched", self._giving[0]):
            self._end_giving(*self._giving)
        if self._consuming and (event.kind, event.step) != ("consumed", self._consuming[0]):
            self._end_consuming(*self._consuming)
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
        """There are no more events."""
        if self._giving:
            self._end_giving(*self._giving)
        if self._consuming:
            self._end_consuming(*self._consuming)
        self._end_dissolving()

    def batched(self, event: pb.LedgerEvent) -> None:
        """A group was given to a step."""
        if event.group_id in self._of:
            step = self._of[event.group_id]
            self.found("batch", event, f"gave group {event.group_id} to step {event.step}, step {step} has it")
            self.batches[step].remove(event.group_id)
        self.batches.setdefault(event.step, []).append(event.group_id)
        self._of[event.group_id] = event.step
        self._giving = (event.step, event)

    def consumed(self, event: pb.LedgerEvent) -> None:
        """A step has used a group of its batch."""
        if self._of.get(event.group_id) != event.step:
            self.found("batch", event, f"consumed group {event.group_id} for step {event.step}, which has not got it")
        if any(event.group_id in self.used.get(step, ()) for step in {event.step, self._of.get(event.group_id, -1)}):
            self.twice.extend(event.sample_ids)
        if not self._rewinding and self._consuming is None and event.step != self.next_step:
            self.found("epoch", event, f"consumed step {event.step}, the next was {self.next_step}")
        self.used.setdefault(event.step, []).append(event.group_id)
        self._consuming = (event.step, event)

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
        """A trainer begins at a step."""
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

    def _end_giving(self, step: int, event: pb.LedgerEvent) -> None:
        self._giving = None
        if len(self.batches[step]) != self.groups_per_step:
            number = len(self.batches[step])
            self.found("batch", event, f"left step {step} with {number} groups, a batch has {self.groups_per_step}")

    def _end_consuming(self, step: int, event: pb.LedgerEvent) -> None:
        self._consuming = None
        batch, used = self.batches.get(step, []), self.used[step]
        if batch != used:
            self.found("batch", event, f"ended step {step} with the groups {used}, its batch has {batch}")
        if self._rewinding:
            return  # the trainer's checkpoint has it: it was fed in another epoch
        self.next_step = step + 1
        if self.epochs:
            self.epochs[-1].consumed.append(step)
