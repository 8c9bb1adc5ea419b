"""What a ledger has to be, written from the protos and the promises alone: no store, no time, no concurrency.

A stream's commands are methods that answer what the server must answer, or raise `No` with the status it must have.
Every change of a group adds a word to `told`, which is what its history must say. Group and lease ids are the server's:
the model learns them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import grpc

from headrace.api.sample.v1 import sample_pb2

QUEUED, LEASED, READY, CONSUMED, COMMITTED, DROPPED, FAILED = (
    "QUEUED", "LEASED", "READY", "CONSUMED", "COMMITTED", "DROPPED", "FAILED",
)  # fmt: skip
STATES = (QUEUED, LEASED, READY, CONSUMED, COMMITTED, DROPPED, FAILED)
_WITH_PAYLOAD = (READY, CONSUMED)


class No(Exception):
    """The command is refused with this status, and nothing has changed."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code.name)
        self.code = code


@dataclass
class Group:
    """One prompt and what became of it."""

    group_id: str
    number: int
    prompt: sample_pb2.Prompt
    state: str = QUEUED
    attempts: int = 0
    lease_id: str = ""
    admitted: int = 0
    samples: tuple[sample_pb2.Sample, ...] = ()
    partials: tuple[sample_pb2.Sample, ...] = ()
    oldest: int = 0
    step: int | None = None
    place: int = 0
    reason: str = ""
    told: list[str] = field(default_factory=lambda: ["submitted"])


@dataclass
class Stream:
    """A stream with FIFO selection, stale groups queued again, leases that last."""

    name: str
    n_samples: int
    groups_per_step: int
    max_staleness: int | None
    max_attempts: int
    groups: dict[str, Group] = field(default_factory=dict)
    by_prompt: dict[str, str] = field(default_factory=dict)
    ended_leases: dict[str, str] = field(default_factory=dict)
    batches: dict[int, list[str]] = field(default_factory=dict)
    epoch: int = 0
    epoch_start: int = 0
    step: int = 0
    committed: int = 0
    version: int = 0
    version_epoch: int = 0
    leases: int = 0

    def of(self, *states: str) -> list[Group]:
        return [group for group in self.groups.values() if group.state in states]

    # Producers

    def submit(self, prompts: list[sample_pb2.Prompt]) -> list[str | None]:
        """The ids of groups that were there; None for one to be made."""
        for prompt in prompts:
            known = self.by_prompt.get(prompt.prompt_id)
            if known and self.groups[known].prompt != prompt:
                raise No(grpc.StatusCode.ALREADY_EXISTS)
        return [self.by_prompt.get(prompt.prompt_id) for prompt in prompts]

    def add(self, group_id: str, prompt: sample_pb2.Prompt) -> None:
        """The server has named a new group."""
        assert group_id not in self.groups, f"{group_id} is another prompt's"
        self.groups[group_id] = Group(group_id, len(self.groups), prompt)
        self.by_prompt[prompt.prompt_id] = group_id

    def places(self) -> int | None:
        """How many groups may be handed out."""
        if self.max_staleness is None:
            return None
        admitted = self.step * self.groups_per_step + len(self.of(LEASED, READY))
        return max((self.max_staleness + min(self.step, self.version) + 1) * self.groups_per_step - admitted, 0)

    def lease(self, count: int) -> list[Group]:
        """The groups that are handed out, in order."""
        places = self.places()
        queued = sorted(self.of(QUEUED), key=lambda group: group.number)
        given = queued[: count if places is None else min(count, places)]
        for group in given:
            self.leases += 1
            group.state, group.attempts, group.admitted = LEASED, group.attempts + 1, self.leases
            group.told.append("leased")
        return given

    def put(self, group: Group, lease_id: str, samples: tuple[sample_pb2.Sample, ...]) -> tuple[str, bool, bool]:
        """(state, duplicate, refused) of a COMPLETE put."""
        if self.ended_leases.get(lease_id) == _fingerprint(samples):
            return group.state, True, False
        if len(samples) < self.n_samples:
            raise No(grpc.StatusCode.INVALID_ARGUMENT)
        held = {s.envelope.sample_id: s.envelope for g in self.groups.values() for s in g.samples}
        if any(held.get(s.envelope.sample_id, s.envelope) != s.envelope for s in samples):
            raise No(grpc.StatusCode.ALREADY_EXISTS)
        if any(r.policy_version > self.version for s in samples for r in s.envelope.policy_ranges):
            raise No(grpc.StatusCode.INVALID_ARGUMENT)
        if group.state != LEASED or group.lease_id != lease_id:
            return group.state, False, True
        self._end_lease(group, samples)
        group.samples, group.partials, group.state = samples, (), READY
        group.oldest = min(r.policy_version for s in samples for r in s.envelope.policy_ranges)
        group.told.append("put")
        self._expire([group], self.step)
        return group.state, False, False

    def end(self, group: Group, outcome: str, reason: str) -> str:
        """The state after a put as DROPPED or FAILED of a live lease."""
        self._end_lease(group, ())
        if outcome == FAILED and group.attempts < self.max_attempts:
            group.state = QUEUED
            group.told.append("failed")
            return group.state
        group.state, group.reason, group.partials = outcome, reason, ()
        group.told.append(outcome.lower())
        return group.state

    def release(self, group: Group, partials: tuple[sample_pb2.Sample, ...]) -> None:
        """The group goes back to the queue, and the lease does not count."""
        self._end_lease(group, None)
        group.state, group.attempts, group.partials = QUEUED, group.attempts - 1, partials or group.partials
        group.told.append("released")

    def retry(self) -> int:
        """How many FAILED groups are queued again."""
        failed = self.of(FAILED)
        for group in failed:
            group.state, group.attempts, group.reason = QUEUED, 0, ""
            group.told.append("retried")
        return len(failed)

    def take_out(self, groups: list[Group]) -> tuple[int, int]:
        """(groups, batches) that an operator's word ends; the others of these batches are READY without one."""
        if any(group.state in (CONSUMED, COMMITTED) for group in groups):
            raise No(grpc.StatusCode.FAILED_PRECONDITION)
        taken = [group for group in groups if group.state != DROPPED]
        steps = {group.step for group in taken if group.step is not None}
        for group in taken:
            group.state, group.reason, group.lease_id = DROPPED, "OPERATOR", ""
            group.samples, group.partials, group.step = (), (), None
            group.told.append("dropped")
        for step in steps:
            for group in (self.groups[group_id] for group_id in self.batches.pop(step)):
                if group.state == READY:
                    group.step = None
                    group.told.append("unbatched")
        return len(taken), len(steps)

    def _end_lease(self, group: Group, samples: tuple[sample_pb2.Sample, ...] | None) -> None:
        if samples:
            self.ended_leases[group.lease_id] = _fingerprint(samples)
        group.lease_id = ""

    def _expire(self, groups: list[Group], step: int) -> None:
        if self.max_staleness is None:
            return
        for group in groups:
            if group.step is None and step - group.oldest > self.max_staleness:
                group.state, group.samples, group.attempts = QUEUED, (), group.attempts - 1
                group.told.append("expired")

    # The trainer

    def batch(self, epoch: int, step: int) -> list[Group] | None:
        """The step's batch, None while it is not full."""
        self._check_epoch(epoch)
        known = max(self.epoch_start, self.committed) <= step <= self.step
        if not known and (step != self.step + 1 or self.step not in self.batches):
            raise No(grpc.StatusCode.FAILED_PRECONDITION)
        if step not in self.batches:
            if step > self.step and self.max_staleness == 0:
                return None
            self._expire(self.of(READY), step)
            free = sorted((g for g in self.of(READY) if g.step is None), key=lambda group: group.admitted)
            if len(free) < self.groups_per_step:
                return None
            self.batches[step] = [group.group_id for group in free[: self.groups_per_step]]
            for place, group in enumerate(free[: self.groups_per_step]):
                group.step, group.place = step, place
                group.told.append("batched")
        return [self.groups[group_id] for group_id in self.batches[step]]

    def consume(self, epoch: int, step: int) -> int:
        """The step after it."""
        self._check_epoch(epoch)
        if not max(self.epoch_start, self.committed) <= step <= self.step or step not in self.batches:
            raise No(grpc.StatusCode.FAILED_PRECONDITION)
        if step == self.step:
            self.step += 1
            for group_id in self.batches[step]:
                self._move(self.groups[group_id], CONSUMED, "consumed")
        return step + 1

    def commit(self, epoch: int, step: int) -> int:
        """How many groups a checkpoint covers now that it did not before."""
        self._check_epoch(epoch)
        if step > self.step:
            raise No(grpc.StatusCode.FAILED_PRECONDITION)
        members = [self.groups[i] for s in range(self.committed, step) for i in self.batches.pop(s)]
        for group in members:
            self._move(group, COMMITTED, "committed")
        self.committed = max(self.committed, step)
        return len(members)

    def rewind(self, step: int) -> tuple[int, int]:
        """(epoch, groups that came back)."""
        if step < self.committed:
            raise No(grpc.StatusCode.FAILED_PRECONDITION)
        back = [self.groups[i] for s in range(step, self.step) for i in self.batches[s]]
        for group in back:
            self._move(group, READY, "rewound")
        self.step = self.epoch_start = step
        self.epoch += 1
        return self.epoch, len(back)

    def serve(self, epoch: int, version: int) -> None:
        """Engines have this version."""
        self._check_epoch(epoch)
        if version < self.version and self.version_epoch == epoch:
            raise No(grpc.StatusCode.FAILED_PRECONDITION)
        self.version, self.version_epoch = version, epoch
        self._expire(self.of(READY), self.step)

    def _move(self, group: Group, state: str, word: str) -> None:
        group.state = state
        group.told.append(word)

    def _check_epoch(self, epoch: int) -> None:
        if epoch > self.epoch or self.epoch == 0:
            raise No(grpc.StatusCode.FAILED_PRECONDITION)
        if epoch < self.epoch:
            raise No(grpc.StatusCode.ABORTED)

    # Readers

    def counts(self) -> dict[str, int]:
        held = Counter(group.state for group in self.groups.values())
        return {state: held[state] for state in STATES}

    def payloads(self) -> dict[str, sample_pb2.Sample]:
        """Every sample that can be fetched."""
        return {s.envelope.sample_id: s for group in self.of(*_WITH_PAYLOAD) for s in group.samples}


def _fingerprint(samples: tuple[sample_pb2.Sample, ...]) -> str:
    return " ".join(s.envelope.SerializeToString(deterministic=True).hex() for s in samples)
