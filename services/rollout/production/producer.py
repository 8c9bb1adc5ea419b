"""Production: leases groups without end, generates them side by side, puts them. Only the buffer's admission limits it.

Consumes leases; waits for admission, a free slot, engines with the ledger's version, and `resume`; produces puts.
States: running ⇄ paused → drained. Leases are renewed while a group is generated; an expired lease ends the work on its
group. Work that no step can train any more ends in a release, as every step that it is fresh enough for has its batch:
with its tokens where a later lease masks them and goes on.
All other work on a group ends in a put or in a release, with one line in the log.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.sample.v1 import sample_pb2
from headrace.client.open import Buffer
from headrace.errors import (
    Aborted,
    DeadlineExceeded,
    HeadraceError,
    InvalidArgument,
    ResourceExhausted,
    RetryableError,
    Unavailable,
)
from headrace.limits import cut_text
from headrace.rpc import tracing
from headrace.rpc.log import kept_running, log
from headrace.rpc.retry import retry_until
from services.rollout.metrics import RolloutMetrics
from services.rollout.production.generator import EndRequest
from services.rollout.production.groups import GroupResult, GroupSampler, request_prefix

STREAM = "train"
_WAIT_SECONDS = 5.0


class BufferLedger:
    """One stream of a buffer service, as producers use it."""

    def __init__(
        self,
        buffer: Buffer,
        stream: str,
        *,
        wait_seconds: float = _WAIT_SECONDS,
        answered: Callable[[buffer_pb2.LeaseGroupsResponse], None] = lambda _: None,
    ) -> None:
        """`answered` is told of every answer to a request for leases."""
        self._answered = answered
        self._buffer = buffer
        self._stream = stream
        self._producer_id = f"rollout-{uuid.uuid4().hex[:8]}"
        self._wait_seconds = wait_seconds
        self._oldest_version = 0

    async def lease(self, max_groups: int) -> buffer_pb2.LeaseGroupsResponse:
        """Waits some seconds for the first group; may return none."""
        answer = await self._buffer.lease_groups(
            self._stream,
            self._producer_id,
            max_groups,
            wait_seconds=self._wait_seconds,
            oldest_version=self._oldest_version,
        )
        self._oldest_version = answer.oldest_version
        self._answered(answer)
        return answer

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        """Returns the ids of leases that have ended."""
        return (await self._buffer.renew_leases(lease_ids)).lost

    async def put(self, group: buffer_pb2.GroupPut) -> buffer_pb2.PutResult:
        """Ends a lease with a result."""
        return (await self._buffer.put_groups([group]))[0]

    async def release(self, releases: Sequence[buffer_pb2.LeaseRelease]) -> None:
        """Returns leases unfinished; their groups are queued again."""
        await self._buffer.release_leases(releases)


_RETRY_SECONDS = 1.0
_RENEWALS_PER_LEASE = 3
_INTERRUPT_SECONDS = 10.0
_LEDGER_BEHIND_SECONDS = 30.0
"""Engines serve a version a moment before the ledger knows it; for this long a put of its tokens may be refused."""
A_PERSON = "a person"
_USELESS = "every step that could train it has its batch"


@dataclass(frozen=True, slots=True)
class _GroupInFlight:
    """`interruption` ends its generation where it is."""

    lease: buffer_pb2.GroupLease
    interruption: asyncio.Event
    work: asyncio.Task[None]


class Producer:
    """Works on at most `max_groups_in_flight` groups at once."""

    def __init__(
        self,
        ledger: BufferLedger,
        sampler: GroupSampler,
        served_version: Callable[[], int],
        metrics: RolloutMetrics,
        *,
        max_groups_in_flight: int,
        interrupt: Callable[[], Awaitable[None]] | None = None,
        end_requests: EndRequest | None = None,
    ) -> None:
        """`interrupt` ends all requests at the engines, `end_requests` those whose ids begin so."""
        self._interrupt = interrupt
        self._end_requests = end_requests
        self._ledger = ledger
        self._sampler = sampler
        self._served_version = served_version
        self._metrics = metrics
        self._max_groups_in_flight = max_groups_in_flight
        self._may_lease = asyncio.Event()
        self._may_lease.set()
        self._paused_by: set[str] = set()
        self._groups: dict[str, _GroupInFlight] = {}
        """The work in progress by lease id."""
        self._something_changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def groups_in_flight(self) -> int:
        """The groups that are worked on."""
        return len(self._groups)

    @property
    def max_groups_in_flight(self) -> int:
        """The present limit, which may be below the job's."""
        return self._max_groups_in_flight

    def limit_groups(self, most: int) -> None:
        """Changes how many groups are worked on at once; those in flight go on."""
        self._max_groups_in_flight = most
        self._something_changed.set()

    @property
    def paused(self) -> bool:
        """True while a person wants no groups to be leased."""
        return A_PERSON in self._paused_by

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(kept_running("lease groups", self._lease_for_ever, self._metrics.background_work_ended))
        ]

    def pause(self, by: str = A_PERSON) -> None:
        """Leases no more; groups in flight finish."""
        self._paused_by.add(by)
        self._may_lease.clear()

    def resume(self, by: str = A_PERSON) -> None:
        """Leases groups again, unless somebody else still pauses it."""
        self._paused_by.discard(by)
        if not self._paused_by:
            self._may_lease.set()

    async def drain(self) -> None:
        """Ends the work in flight and releases its leases, with the tokens so far if the job wants them."""
        for task in self._tasks:
            task.cancel()
        if self._groups and self._interrupt and self._sampler.returns_partials:
            await self._interrupt_groups(self._interrupt)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._give_back(list(self._groups.values()), "the rollout service stops")

    async def _interrupt_groups(self, interrupt: Callable[[], Awaitable[None]]) -> None:
        for group in self._groups.values():
            group.interruption.set()
        await interrupt()
        await asyncio.wait([group.work for group in self._groups.values()], timeout=_INTERRUPT_SECONDS)

    async def _release(self, releases: list[buffer_pb2.LeaseRelease]) -> None:
        try:
            await self._ledger.release(releases)
        except ResourceExhausted as error:
            log.warning("partial_samples_not_kept", error=error.message)
            await self._release_bare(releases)
        except HeadraceError as error:
            log.warning("leases_not_released", leases=len(releases), error=error.message)  # they will expire

    async def _release_bare(self, releases: list[buffer_pb2.LeaseRelease]) -> None:
        try:
            await self._ledger.release([_release(release.lease_id, release.reason) for release in releases])
        except HeadraceError as error:
            log.warning("leases_not_released", leases=len(releases), error=error.message)

    async def _lease_for_ever(self) -> None:
        while True:
            await self._may_lease.wait()
            free = await self._free_places()
            try:
                answer = await self._ledger.lease(free)
            except HeadraceError as error:
                log.warning("lease_failed", error=error.message)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            await self._end_useless(answer.oldest_version)
            behind = [lease for lease in answer.leases if lease.policy_version > self._served_version()]
            for lease in answer.leases:
                if lease not in behind:
                    self._begin(lease)
            if behind:
                await self._hand_back(behind)

    def _begin(self, lease: buffer_pb2.GroupLease) -> None:
        interruption = asyncio.Event()
        work = asyncio.create_task(self._work(lease, interruption))
        self._groups[lease.lease_id] = _GroupInFlight(lease, interruption, work)

    async def _end_useless(self, oldest_version: int) -> None:
        """Ends groups with older tokens that would be trained; with them, where a later lease may mask them."""
        groups = self._groups.values()
        useless = [group for group in groups if self._sampler.oldest_version(group.lease) < oldest_version]
        if not useless:
            return
        log.info("groups_ended", groups=len(useless), why=_USELESS)
        if not self._sampler.masks_partials:
            await self._give_back(useless, _USELESS)
        elif self._end_requests:  # asked again with the next lease: a request may be on its way to an engine
            for group in useless:
                group.interruption.set()
            await asyncio.gather(*(self._end_requests(request_prefix(group.lease)) for group in useless))

    async def _give_back(self, groups: Sequence[_GroupInFlight], why: str) -> None:
        """Ends the work on groups and releases their leases."""
        for group in groups:
            group.work.cancel()
        await asyncio.gather(*(group.work for group in groups), return_exceptions=True)
        if groups:
            await self._release([_release(group.lease.lease_id, why) for group in groups])

    async def _free_places(self) -> int:
        while len(self._groups) >= self._max_groups_in_flight:
            self._something_changed.clear()
            await self._something_changed.wait()
        return self._max_groups_in_flight - len(self._groups)

    async def _hand_back(self, leases: list[buffer_pb2.GroupLease]) -> None:
        """Releases leases while engines have hf_checkpoint's weights, after a restart, until the next publication."""
        why = f"engines serve version {self._served_version()}, the ledger is at {leases[0].policy_version}"
        log.warning("engines_behind", why=why)
        await self._release([_release(lease.lease_id, why) for lease in leases])
        await asyncio.sleep(_RETRY_SECONDS)

    async def _work(self, lease: buffer_pb2.GroupLease, interruption: asyncio.Event) -> None:
        """Ends in a put or in a release, whatever happens, unless the lease has ended."""
        keeper = asyncio.create_task(
            kept_running("renew a lease", lambda: self._keep(lease), self._metrics.background_work_ended)
        )
        facts = {"headrace.group": lease.group_id, "headrace.lease": lease.lease_id}
        try:
            with tracing.span("headrace.lease", tracing.group(lease.group_id, lease.n_samples), facts):
                result = await self._sampled(lease, interruption if self._sampler.returns_partials else None)
                release = await self._put(lease, result) if isinstance(result, buffer_pb2.GroupPut) else result
                if release is not None:
                    log.info("group_released", group_id=lease.group_id, why=release.reason)
                    await self._release([release])
        finally:
            keeper.cancel()
            del self._groups[lease.lease_id]
            self._something_changed.set()

    async def _sampled(self, lease: buffer_pb2.GroupLease, return_partial: asyncio.Event | None) -> GroupResult:
        try:
            return await self._sampler.sample(lease, return_partial)
        except (RetryableError, Aborted, DeadlineExceeded) as error:
            return _release(lease.lease_id, cut_text(f"{error.reason}: {error.message}"))
        except HeadraceError as error:
            return self._failed(lease, error.reason, error.message)
        except Exception as error:  # noqa: BLE001  # one group's bug is that group's failure
            self._metrics.group_raised()
            log.error("group_raised", group_id=lease.group_id, exc_info=error)
            return self._failed(lease, "GROUP_RAISED", f"{type(error).__name__}: {error}")

    def _failed(self, lease: buffer_pb2.GroupLease, reason: str, message: str) -> buffer_pb2.GroupPut:
        log.error("group_failed", group_id=lease.group_id, reason=reason, error=message)
        return buffer_pb2.GroupPut(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            outcome=buffer_pb2.PUT_OUTCOME_FAILED,
            failure=sample_pb2.Failure(reason=reason, message=cut_text(message)),
        )

    async def _keep(self, lease: buffer_pb2.GroupLease) -> None:
        work = self._groups[lease.lease_id].work
        while True:
            await asyncio.sleep(lease.lease_seconds / _RENEWALS_PER_LEASE)
            try:
                lost = await self._ledger.renew([lease.lease_id])
            except HeadraceError as error:
                log.warning("renew_failed", group_id=lease.group_id, error=error.message)
                continue
            if lost:
                log.warning("lease_lost", group_id=lease.group_id, lease_id=lease.lease_id)
                work.cancel()
                return

    async def _put(self, lease: buffer_pb2.GroupLease, put: buffer_pb2.GroupPut) -> buffer_pb2.LeaseRelease | None:
        """Returns None once the ledger has the put. One that it refuses for good is put as FAILED, or else released."""
        ranges = (r for sample in put.samples for r in sample.envelope.policy_ranges)
        newest = max((r.policy_version for r in ranges), default=0)
        if newest > self._served_version():
            return _release(lease.lease_id, f"version {newest} is not served any more: its trainer started again")
        try:
            with tracing.span("headrace.put"):
                result = await self._delivered(put, may_be_early=newest > lease.policy_version)
        except Exception as error:  # noqa: BLE001  # what it was made of cannot be stored; that it failed can be
            if put.outcome == buffer_pb2.PUT_OUTCOME_FAILED:
                return _release(lease.lease_id, cut_text(f"neither put nor failed: {error}"))
            return await self._put(lease, self._failed(lease, "PUT_REFUSED", str(error)))
        if result.HasField("refused"):
            log.warning("put_refused", group_id=put.group_id, reason=result.refused.reason)
            return None
        tokens = sum(sample.envelope.response_tokens for sample in put.samples)
        outcome = buffer_pb2.PutOutcome.Name(put.outcome).removeprefix("PUT_OUTCOME_").lower()
        self._metrics.group_done(outcome, tokens)
        log.info("group_put", group_id=put.group_id, outcome=outcome, tokens=tokens, reason=put.failure.reason)
        return None

    async def _delivered(self, put: buffer_pb2.GroupPut, *, may_be_early: bool) -> buffer_pb2.PutResult:
        """Repeats the put until the ledger has answered; that is safe, as a put is idempotent and ends its lease."""
        early_until = time.monotonic() + _LEDGER_BEHIND_SECONDS if may_be_early else 0.0

        def may_help(error: HeadraceError) -> bool:
            if isinstance(error, Unavailable | DeadlineExceeded):
                log.warning("put_not_answered", group_id=put.group_id, error=error.message)
            if isinstance(error, InvalidArgument):
                return time.monotonic() <= early_until
            return isinstance(error, RetryableError | DeadlineExceeded)

        return await retry_until(math.inf, lambda _: self._ledger.put(put), may_help)


def _release(lease_id: str, why: str) -> buffer_pb2.LeaseRelease:
    return buffer_pb2.LeaseRelease(lease_id=lease_id, reason=why)
