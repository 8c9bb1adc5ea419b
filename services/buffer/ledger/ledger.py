"""The ledger's state machine: commands in, answers and transactions out. No gRPC, no disk, no clock: time is passed in.

A command is a function `(ledger, now, request) → (answer, transaction)`. It checks everything first and raises with
nothing changed, or changes memory and returns what must be made durable before its answer may leave the process. One
that changes nothing returns an empty transaction; its answer still has to wait for the transactions before it. No
command looks at all groups: every question has an index.
The states are in `group`, the staleness rule in `admission`, the commands in `produce`, `train`, `operate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from headrace.errors import NotFound
from services.buffer.ledger import operate, produce, train
from services.buffer.ledger.group import Group, GroupState, SampleRecord
from services.buffer.ledger.state import Instant, LedgerState
from services.buffer.ledger.work import command, command_of_stream


class Ledger(LedgerState):
    """The commands, and questions that change nothing durable."""

    create_stream = command(operate.create)
    set_limits = command(operate.set_limits)
    delete_stream = command(operate.delete)
    purge_deleted = command(operate.purge_deleted)

    submit = command_of_stream(produce.submit)
    read = command_of_stream(produce.read)
    lease = command_of_stream(produce.lease)
    release = command(produce.release)
    put = command(produce.put)
    expire_leases = command(produce.expire_leases)

    lease_batch = command_of_stream(train.lease_batch)
    choose = command_of_stream(train.choose)
    consume = command_of_stream(train.consume)
    commit = command_of_stream(train.commit)
    delete_ended = command_of_stream(train.delete_ended)
    rewind = command_of_stream(train.rewind)
    set_policy_version = command_of_stream(train.set_policy_version)

    retry = command_of_stream(operate.retry)
    drop = command_of_stream(operate.drop)

    def no_lease_reason(self, stream: str) -> produce.NoLeaseReason | None:
        """Returns why no group may be leased now; None when one may."""
        return produce.no_lease_reason(self.stream(stream))

    def lease_seconds_left(self, now: Instant, lease_id: str) -> float | None:
        """Returns the time until a lease expires; None when it has ended."""
        return self.leases.seconds_left(lease_id, now.monotonic) if self.live(lease_id) else None

    def renew(self, now: Instant, lease_ids: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns (renewed ids, ids of leases that have ended). It is not durable, because deadlines are not."""
        renewed: list[str] = []
        lost: list[str] = []
        for lease_id in lease_ids:
            group = self.live(lease_id)
            if group is None:
                lost.append(lease_id)
                continue
            seconds = self.streams[group.stream].state.config.lease_seconds
            self.leases.renew(lease_id, now.monotonic + seconds)
            renewed.append(lease_id)
        return renewed, lost

    def renew_all(self, now: Instant) -> None:
        """Starts the full time of every lease again, after nobody could renew it."""
        self.renew(now, [group.live_lease.lease_id for group in self.leases.live()])

    def sample_records(
        self, stream: str, sample_ids: Sequence[str], *, skip_unknown: bool = False
    ) -> list[SampleRecord]:
        """Returns the records in the order asked. Raises NotFound naming the ids that are deleted or unknown."""
        indexed = self.stream(stream)
        found: list[SampleRecord] = []
        gone: list[str] = []
        of_group: dict[str, Mapping[str, SampleRecord]] = {}
        for sample_id in sample_ids:
            group_id = indexed.samples.get(sample_id)
            if group_id is None or indexed.groups[group_id].state is GroupState.COMMITTED:
                gone.append(sample_id)
                continue
            if group_id not in of_group:
                of_group[group_id] = {record.sample_id: record for record in indexed.groups[group_id].samples}
            found.append(of_group[group_id][sample_id])
        if gone and not skip_unknown:
            some = f"{gone[:10]} and {len(gone) - 10} others" if len(gone) > 10 else f"{gone}"
            raise NotFound(f"stream {stream} has no payload of the samples {some}: never put, expired or committed")
        return found

    def list_groups(
        self, stream: str, states: Sequence[GroupState], before: int | None, count: int
    ) -> tuple[list[Group], int | None]:
        """Newest change first, below position `before`; and where the next page starts, None on the last."""
        order = self.stream(stream).change_order
        end = self.position + 1 if before is None else before
        page = list(islice(order.before(end, states or tuple(GroupState)), count + 1))
        return page[:count], page[count - 1].position if len(page) > count else None
