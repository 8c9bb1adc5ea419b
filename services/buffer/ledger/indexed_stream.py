"""One stream in memory: its state, its groups, and an index for every question that a command asks."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec

from headrace.digest import batch_digest, batch_digest_of_0_1
from headrace.errors import DataLoss
from services.buffer.ledger.admission import oldest_trainable, oldest_wanted, slots_left
from services.buffer.ledger.group import Group, GroupState, SampleRecord
from services.buffer.ledger.production import Production
from services.buffer.ledger.queues import ChangeOrder, SourceQueues
from services.buffer.ledger.stream import StreamState

_encode = msgspec.msgpack.Encoder().encode
_WITH_SAMPLES = frozenset((GroupState.READY, GroupState.CONSUMED))
_MAX_NAMED = 10
_UNENDED = frozenset((GroupState.QUEUED, GroupState.LEASED, GroupState.READY, GroupState.CONSUMED))


class IndexedStream:
    """`place` is the only way in: it moves a group from the indexes of its old state to those of its new one."""

    def __init__(self, state: StreamState) -> None:
        self.state = state
        self.groups: dict[str, Group] = {}
        self.queues = SourceQueues(state.config)
        self.prompts: dict[str, str] = {}
        self.samples: dict[str, str] = {}
        """Sample id → the group that has it."""
        self.lost_groups: set[str] = set()
        """Ids of groups whose records are damaged: nothing else is known of them."""
        self.counts: Counter[GroupState] = Counter()
        self.payload_bytes = 0
        self.sample_bytes = 0
        """Payloads, envelopes and columns of READY and CONSUMED groups, and all partial samples."""
        self.prompt_bytes = 0
        """The prompts of groups that may still be trained."""
        self.change_order = ChangeOrder(self.groups)
        self.production = Production()
        self._batches: defaultdict[int, dict[int, str]] = defaultdict(dict)
        self._digests: dict[int, bytes] = {}
        """Step → its batch's digest, until the batch changes."""
        self._ended: defaultdict[int, list[str]] = defaultdict(list)

    def place(self, group: Group) -> None:
        """Records a group's new version."""
        before = self.groups.get(group.group_id)
        self.groups[group.group_id] = group
        if before is None:
            self.prompts[group.prompt.prompt_id] = group.group_id
            self._hold((), group.records)
            self._know(group.group_id, (), group.samples)
        else:
            self._leave(before)
            if before.samples is not group.samples:
                self._know(group.group_id, before.samples, group.samples)
            if before.state is not group.state and before.records is not group.records:
                self._hold(before.records, group.records)
        self._enter(group)
        if before:
            self.change_order.left(before.state)

    def batch(self, step: int) -> list[Group] | None:
        """Returns a step's groups in training order, or None without a batch. Raises DataLoss when groups are lost.

        Where the ids of the lost groups are lost, too, dropping any group of the batch dissolves it.
        """
        members = self.members(step)
        if not members:
            return None
        if (missing := self.state.config.groups_per_step - len(members)) == 0:
            return members
        named = sorted(self.lost_groups)[:_MAX_NAMED] or [members[0].group_id]
        lost = f", of the lost groups {named}" if self.lost_groups else ""
        options = " ".join(f"--group {group_id}" for group_id in named)
        raise DataLoss(
            f"stream {self.state.name}: the records of {missing} of the {len(members) + missing} groups in the batch "
            f"of step {step} are damaged{lost}; to give the step another batch: "
            f"headrace buffer drop --stream {self.state.name} {options} --reason damaged",
            reason="GROUP_LOST",
        )

    def incomplete_steps(self) -> list[int]:
        """Steps whose batch lacks groups that the store lost."""
        wanted = self.state.config.groups_per_step
        return sorted(step for step, members in self._batches.items() if len(members) != wanted)

    def note_lost(self, group_id: str) -> None:
        """Notes that the group's record is damaged, unless the name cannot be a group of this stream."""
        if group_id not in self.groups and self.state.first_seq <= self.seq_of(group_id) < self.state.next_seq:
            self.lost_groups.add(group_id)

    def seq_of(self, group_id: str) -> int:
        """Returns the number in a group's id, or -1 when the id is not one of this stream's."""
        config = self.state.config
        number = group_id.removeprefix(f"{config.name}/")
        if number == group_id or not number.isdecimal() or str(int(number)) != number:
            return -1
        seq, shard = divmod(int(number), config.num_shards)
        return seq if shard == config.shard else -1

    def next_filled(self) -> tuple[int, int | None]:
        """(the step that the next READY group fills, the oldest version that it may be trained with there)."""
        waiting = self.counts[GroupState.READY] + self.counts[GroupState.LEASED]
        step = self.state.step + waiting // self.state.config.groups_per_step
        return step, oldest_trainable(self.state, step)

    def members(self, step: int) -> list[Group]:
        """Returns those groups of a step's batch that are not lost, in training order."""
        members = self._batches.get(step, {})
        return [self.groups[members[i]] for i in sorted(members)]

    def batched_steps(self, first: int, end: int) -> list[int]:
        return sorted(step for step in self._batches if first <= step < end)

    def delete(self, group_id: str) -> Group:
        """Removes an ended group from memory."""
        group = self.groups.pop(group_id)
        self._leave(group)
        self._hold(group.records, ())
        self._know(group_id, group.samples, ())
        del self.prompts[group.prompt.prompt_id]
        self.change_order.left(group.state)
        return group

    def batch_digest(self, step: int) -> bytes:
        """Names a step's batch by everything of it that is trained."""
        if step not in self._digests:
            self._digests[step] = batch_digest(map(group_digest, self.members(step)))
        return self._digests[step]

    def is_batch(self, step: int, digest: bytes) -> bool:
        """True when the digest names the step's batch; a buffer of 0.1.0 may have answered it before an upgrade."""
        if digest == self.batch_digest(step):
            return True
        members = self.members(step)
        return digest == batch_digest_of_0_1((group.group_id, [r.digest for r in group.samples]) for group in members)

    def take_ended(self, end: int, most: int) -> list[str]:
        """Removes and returns the ids of at most `most` groups that ended with a step below `end`."""
        taken: list[str] = []
        for step in sorted(step for step in self._ended if step < end):
            ids = self._ended[step]
            room = most - len(taken)
            taken += ids[:room]
            del ids[:room]
            if not ids:
                del self._ended[step]
            if len(taken) == most:
                break
        return taken

    def count(self, state: GroupState) -> int:
        """Counts the groups in a state, including those that were deleted since."""
        return self.counts[state] + self.state.forgotten.get(state.value, 0)

    @property
    def stored_bytes(self) -> int:
        """All bytes that count towards max_payload_bytes."""
        return self.sample_bytes + self.prompt_bytes

    @property
    def num_groups(self) -> int:
        """Counts the groups that may still be trained."""
        return sum(self.counts[state] for state in _UNENDED)

    def admitted_left(self) -> int | None:
        """Counts the groups that staleness lets producers lease now; None without admission control."""
        leased, ready = self.counts[GroupState.LEASED], self.counts[GroupState.READY]
        return slots_left(self.state, leased, ready, self._batches.__contains__)

    def oldest_wanted(self) -> int:
        """Returns the oldest version that some step without a batch may train; 0 when all may be trained."""
        return oldest_wanted(self.state, self._batches.__contains__)

    def inserts_left(self) -> int | None:
        """Counts the groups that the limiter lets producers lease now; None without a limit."""
        limiter = self.state.config.limiter
        if limiter is None:
            return None
        leased = self.counts[GroupState.LEASED]
        left = limiter.inserts_left(
            num_inserted=self.state.num_inserted, num_taken=self.state.num_taken, num_leased=leased
        )
        needed = max(self.state.config.groups_per_step, limiter.min_size)
        return None if left is None else max(left, needed - self.queues.num_ready - leased)

    def slots_left(self) -> int | None:
        """Counts the groups that may be leased now; None without admission control and limiter."""
        rules = [left for left in (self.admitted_left(), self.inserts_left()) if left is not None]
        return min(rules) if rules else None

    def prompts_wanted(self, max_groups: int, *, is_held_back: bool = False) -> Sequence[int]:
        """The number of prompts to read from each source so that `max_groups` may be leased.

        `is_held_back`: one step fewer ahead, but for what the next step lacks.
        """
        room = self.state.config.max_groups - self.num_groups
        if not self.state.config.has_source or self.state.exhausted or room <= 0:
            return ()
        slots = self._slots_held_back() if is_held_back else self.slots_left()
        return self.queues.wanted(self.state, max_groups if slots is None else min(max_groups, slots), room)

    def _slots_held_back(self) -> int | None:
        """`slots_left` with a max_staleness of one less, but for what the next step lacks."""
        slots, wanted = self.slots_left(), self.state.config.groups_per_step
        if slots is None or not self.state.config.max_staleness:
            return slots
        lacking = wanted - self.counts[GroupState.LEASED] - self.counts[GroupState.READY]
        return max(slots - wanted, min(slots, lacking), 0)

    def may_take(self, count: int) -> bool:
        """True when `count` groups are READY for a batch and the limiter lets them go."""
        if self.queues.num_ready < count:
            return False
        limiter = self.state.config.limiter
        if limiter is None or (self.slots_left() == 0 and not self.counts[GroupState.LEASED]):
            return True
        state = self.state
        return limiter.may_take(
            count, num_inserted=state.num_inserted, num_taken=state.num_taken, num_ready=self.queues.num_ready
        )

    def _enter(self, group: Group) -> None:
        self.counts[group.state] += 1
        if group.state in _UNENDED:
            self.prompt_bytes += len(group.prompt.body)
        self.change_order.entered(group)
        if group.state is GroupState.QUEUED:
            self.queues.enqueue(group)
        elif group.state is GroupState.LEASED:
            self.queues.lease(group)
        elif group.state in _WITH_SAMPLES:
            if group.step is None or group.batch_index is None:
                self.queues.add_ready(group)
            else:
                self._batches[group.step][group.batch_index] = group.group_id
                self._digests.pop(group.step, None)
        elif group.ended_step is not None:
            self._ended[group.ended_step].append(group.group_id)

    def _leave(self, group: Group) -> None:
        self.counts[group.state] -= 1
        if group.state in _UNENDED:
            self.prompt_bytes -= len(group.prompt.body)
        if group.state is GroupState.LEASED:
            self.queues.unlease(group)
        if group.state not in _WITH_SAMPLES:
            return
        if group.step is None or group.batch_index is None:
            self.queues.discard_ready(group.group_id)
            return
        members = self._batches[group.step]
        del members[group.batch_index]
        self._digests.pop(group.step, None)
        if not members:
            del self._batches[group.step]

    def _hold(self, before: tuple[SampleRecord, ...], now: tuple[SampleRecord, ...]) -> None:
        for record in before:
            self.payload_bytes -= record.payload_bytes
            self.sample_bytes -= record.stored_bytes
        for record in now:
            self.payload_bytes += record.payload_bytes
            self.sample_bytes += record.stored_bytes

    def _know(self, group_id: str, before: tuple[SampleRecord, ...], now: tuple[SampleRecord, ...]) -> None:
        for record in before:
            del self.samples[record.sample_id]
        for record in now:
            self.samples[record.sample_id] = group_id


def group_digest(group: Group) -> bytes:
    """SHA-256 over the group's id and all of its samples that is trained, as the ledger has it."""
    samples = [(r.index, r.oldest_version, r.reward, r.digest, r.envelope) for r in group.samples]
    return hashlib.sha256(_encode((group.group_id, group.oldest_version, samples))).digest()
