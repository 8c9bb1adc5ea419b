"""Production: leases groups for ever, makes them side by side, puts them. Only admission (the buffer's) holds it back.

Consumes leases; waits for admission, a free place, engines with the ledger's version, and `resume`; produces puts.
States: running ⇄ paused → drained. Leases are renewed while a group is made; a lost lease ends the work on its group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.api.buffer.v1 import buffer_pb2
from headrace.errors import HeadraceError, ResourceExhausted
from headrace.rpc.log import log
from services.rollout.groups import GroupMaker
from services.rollout.ledger import Ledger
from services.rollout.metrics import RolloutMetrics

_RETRY_SECONDS = 1.0
_RENEWALS_PER_LEASE = 3
_INTERRUPT_SECONDS = 10.0


class Producer:
    """At most `max_groups_in_flight` groups at once."""

    def __init__(
        self,
        ledger: Ledger,
        maker: GroupMaker,
        served_version: Callable[[], int],
        metrics: RolloutMetrics,
        *,
        max_groups_in_flight: int,
        interrupt: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._interrupt = interrupt
        self._interruptions: dict[str, asyncio.Event] = {}  # lease id → ends its generation where it is
        self._ledger = ledger
        self._maker = maker
        self._served_version = served_version
        self._metrics = metrics
        self._max_groups_in_flight = max_groups_in_flight
        self._may_lease = asyncio.Event()
        self._may_lease.set()
        self._groups: dict[str, asyncio.Task[None]] = {}  # lease id → the work on it
        self._something_ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def paused(self) -> bool:
        """True while no groups are leased."""
        return not self._may_lease.is_set()

    def start(self) -> None:
        """Begins to produce."""
        self._tasks = [asyncio.create_task(self._lease_for_ever())]

    def pause(self) -> None:
        """Leases no more; groups in flight finish."""
        self._may_lease.clear()

    def resume(self) -> None:
        """Goes on."""
        self._may_lease.set()

    async def drain(self) -> None:
        """Ends the work in flight and gives its leases back, with the tokens so far where the job wants them kept."""
        for task in self._tasks:
            task.cancel()
        if self._groups and self._interrupt and self._maker.hands_back:
            await self._interrupt_groups(self._interrupt)
        lease_ids, works = list(self._groups), list(self._groups.values())
        for work in works:
            work.cancel()
        await asyncio.gather(*self._tasks, *works, return_exceptions=True)
        if lease_ids:
            await self._release([_release(lease_id, "the rollout service stops") for lease_id in lease_ids])

    async def _interrupt_groups(self, interrupt: Callable[[], Awaitable[None]]) -> None:
        for event in self._interruptions.values():
            event.set()
        await interrupt()
        await asyncio.wait(list(self._groups.values()), timeout=_INTERRUPT_SECONDS)

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
                leases = await self._ledger.lease(free)
            except HeadraceError as error:
                log.warning("lease_failed", error=error.message)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            behind = [lease for lease in leases if lease.policy_version > self._served_version()]
            for lease in leases:
                if lease not in behind:
                    self._groups[lease.lease_id] = asyncio.create_task(self._work(lease))
            if behind:
                await self._hand_back(behind)

    async def _free_places(self) -> int:
        while len(self._groups) >= self._max_groups_in_flight:
            self._something_ended.clear()
            await self._something_ended.wait()
        return self._max_groups_in_flight - len(self._groups)

    async def _hand_back(self, leases: list[buffer_pb2.GroupLease]) -> None:
        """After a restart engines have hf_checkpoint's weights: wait for the trainer's next publication."""
        why = f"engines serve version {self._served_version()}, the ledger is at {leases[0].policy_version}"
        log.warning("engines_behind", why=why)
        await self._release([_release(lease.lease_id, why) for lease in leases])
        await asyncio.sleep(_RETRY_SECONDS)

    async def _work(self, lease: buffer_pb2.GroupLease) -> None:
        keeper = asyncio.create_task(self._keep(lease))
        hand_back = self._interruptions[lease.lease_id] = asyncio.Event()
        try:
            made = await self._maker.make(lease, hand_back if self._maker.hands_back else None)
            if isinstance(made, buffer_pb2.LeaseRelease):
                log.info("group_interrupted", group_id=lease.group_id, how=made.reason)
                await self._release([made])
            else:
                await self._put(made)
        except HeadraceError as error:
            log.error("group_lost", group_id=lease.group_id, reason=error.reason, error=error.message)
        except Exception as error:  # one group's bug must not end production; the lease expires and is counted
            log.error("group_raised", group_id=lease.group_id, exc_info=error)
        finally:
            keeper.cancel()
            del self._groups[lease.lease_id], self._interruptions[lease.lease_id]
            self._something_ended.set()

    async def _keep(self, lease: buffer_pb2.GroupLease) -> None:
        work = self._groups[lease.lease_id]
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

    async def _put(self, put: buffer_pb2.GroupPut) -> None:
        while True:
            try:
                result = await self._ledger.put(put)
                break
            except ResourceExhausted as error:
                await asyncio.sleep(error.retry_after_seconds)
        if result.HasField("refused"):
            log.warning("put_refused", group_id=put.group_id, reason=result.refused.reason)
            return
        tokens = sum(sample.envelope.response_tokens for sample in put.samples)
        outcome = buffer_pb2.PutOutcome.Name(put.outcome).removeprefix("PUT_OUTCOME_").lower()
        self._metrics.group_done(outcome, tokens)
        log.info("group_put", group_id=put.group_id, outcome=outcome, tokens=tokens, reason=put.failure.reason)


def _release(lease_id: str, why: str) -> buffer_pb2.LeaseRelease:
    return buffer_pb2.LeaseRelease(lease_id=lease_id, reason=why)
