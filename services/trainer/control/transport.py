"""How weights go to engines, seen from rank 0: the interface of a transport, broadcasts, and folders.

The rollout services of one publication are asked all at once, and left behind when they fail. They do not depend on
each other: each has its own group of engines. But the trainer sends a bucket to all of them before the next one, so
one that hangs is left once the others had their time and some more.

Collective: a bucket is offered to the engines while its sender is at it, in one group a stage.

Disk: weights lie in a folder, on a disk or in shared memory, from which every engine loads them when it is told to. A
version is written before engines know of it, so they stand still only while they load. The folder of the version that
is served stays: engines that come back load it, and so do all of them when a later version fails. A folder has its
name from its publication, and has it only once it is whole; what is neither served nor being published is deleted.
Several runs may write into one folder: each deletes only versions that it has noted in its own folder.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.client.rollout import RolloutClient
from headrace.errors import DeadlineExceeded, DiskFull, Fenced, HeadraceError, PublicationAborted
from headrace.job.schema.run import PublishSection
from headrace.limits import MAX_COLUMN_BYTES
from headrace.rpc.log import log
from services.trainer.control.ranks import RankGroup, results_of
from services.trainer.control.senders import SMALLER, Sent, StageGroup, StageWeights, part_of
from services.trainer.control.worker import RankWorker
from services.trainer.durable import append_rows, remove
from services.trainer.loop import Devices

STRAGGLER_SECONDS = 10.0

T = TypeVar("T")


class Straggler(DeadlineExceeded):
    """The others were done long before; it may still come to its own end."""


class Recipients:
    """The services by number; `left` has those that failed, with the error."""

    def __init__(self, services: Mapping[int, RolloutClient]) -> None:
        self.remaining = dict(services)
        self.left: dict[int, HeadraceError] = {}

    async def each(
        self, ask: Callable[[int, RolloutClient], Awaitable[T]], *, is_slow_alike: bool = True
    ) -> dict[int, T]:
        """The answers of those that go on.

        Once the quickest is done, others have STRAGGLER_SECONDS, and where they are slow alike as long again as it had.
        Raises Fenced when one says so, and the last error when none remains.
        """
        calls = {number: asyncio.ensure_future(ask(number, client)) for number, client in self.remaining.items()}
        try:
            await _all_but_stragglers(list(calls.values()), is_slow_alike=is_slow_alike)
        finally:
            late = [call for call in calls.values() if not call.done()]
            for call in late:
                call.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        for number, call in calls.items():
            if call.cancelled():
                self.leave(number, Straggler("it was not done when the other rollout services had long been"))
            elif isinstance(error := call.exception(), HeadraceError):
                self.leave(number, error)
        if fenced := next((error for error in self.left.values() if isinstance(error, Fenced)), None):
            raise fenced
        self.require_any()
        return {number: calls[number].result() for number in self.remaining}

    def leave(self, number: int, error: HeadraceError) -> None:
        """It does not take part any more."""
        if self.remaining.pop(number, None) is not None:
            self.left[number] = error

    def require_any(self) -> None:
        """Raises the error of the one that was left last when none remains."""
        if not self.remaining:
            raise list(self.left.values())[-1]


async def _all_but_stragglers(calls: list[asyncio.Future[T]], *, is_slow_alike: bool) -> None:
    started, end = time.monotonic(), None
    pending = set(calls)
    while pending:
        seconds = None if end is None else max(end - time.monotonic(), 0.0)
        done, pending = await asyncio.wait(pending, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return
        if end is None and any(not call.cancelled() and call.exception() is None for call in done):
            now = time.monotonic()
            end = now + STRAGGLER_SECONDS + (now - started if is_slow_alike else 0.0)


Staged = TypeVar("Staged", StageWeights, StageGroup)


def _by_stage(results: Sequence[Staged]) -> list[Staged]:
    return sorted(results, key=lambda result: result.stage)


@dataclass(frozen=True, slots=True)
class PublicationPlan:
    """The tensors of all stages, and which buckets each stage sends; the same throughout the run."""

    manifest: pb.Manifest
    buckets_of_stages: Sequence[range]

    @classmethod
    def of(cls, stages: Sequence[StageWeights]) -> PublicationPlan:
        """Buckets are numbered through all stages, in the stages' order."""
        tensors: list[pb.TensorSpec] = []
        buckets_of_stages = []
        first = 0
        for stage in _by_stage(stages):
            buckets_of_stages.append(range(first, first + len(stage.buckets)))
            first += len(stage.buckets)
            for number, bucket in zip(buckets_of_stages[-1], stage.buckets, strict=True):
                tensors += [spec.pack(number) for spec in bucket]
        return cls(pb.Manifest(tensors=tensors), buckets_of_stages)

    @staticmethod
    def in_one_bucket(stages: Sequence[StageWeights]) -> pb.Manifest:
        """The tensors of all stages in bucket 0, as engines get them that load them from one folder."""
        buckets = [bucket for stage in _by_stage(stages) for bucket in stage.buckets]
        return pb.Manifest(tensors=[spec.pack(0) for bucket in buckets for spec in bucket])

    @property
    def num_buckets(self) -> int:
        """The number of buckets of all stages together."""
        return sum(map(len, self.buckets_of_stages))

    def groups(self, opened: Sequence[StageGroup]) -> list[pb.PublishGroup]:
        """The groups with the buckets that travel in them; `opened` has one group a stage."""
        return [
            pb.PublishGroup(
                name=group.name,
                master_address=group.host,
                master_port=group.port,
                buckets=buckets,
                joined=group.joined,
            )
            for buckets, group in zip(
                self.buckets_of_stages, sorted(opened, key=lambda group: group.stage), strict=True
            )
        ]


class Source(StrEnum):
    """The weights that a publication is for: the model's, new or already served, or those that were served before."""

    NEW = "new"
    SERVED = "served"
    BEFORE = "before"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try to publish a version, by the trainer of an epoch."""

    publication_id: str
    policy_version: int
    epoch: int
    source: Source

    @classmethod
    def of(cls, policy_version: int, epoch: int, source: Source) -> Attempt:
        """Its id is no other's, and says the epoch and the version."""
        return cls(f"e{epoch}-v{policy_version}-{uuid.uuid4().hex[:8]}", policy_version, epoch, source)


@dataclass(frozen=True, slots=True)
class Offer:
    """The transport's fields of BeginPublish; each rollout service has its own groups."""

    transport: pb.Transport.ValueType
    manifest: pb.Manifest
    groups: Mapping[int, Sequence[pb.PublishGroup]] = field(default_factory=dict)
    disk_path: str = ""
    deltas: Mapping[int, pb.Delta] = field(default_factory=dict)


Digests = Mapping[int, str]
"""What rollout services answered about the weights that they committed."""


class Transport(Protocol):
    """Rank 0's part. Calls come in the order of these methods; `leave` and `drop` may come after any of them.

    `services` are numbers of rollout services.
    """

    async def prepare(self, attempt: Attempt, services: Collection[int]) -> Offer:
        """Does what can be done before engines know of it."""

    async def deliver(
        self, attempt: Attempt, recipients: Recipients, begun: Mapping[int, pb.BeginPublishResponse]
    ) -> Mapping[str, str]:
        """Returns the checksums that engines must have, once all weights are with those of the remaining recipients."""

    async def accept(self, attempt: Attempt, digests: Digests) -> bool:
        """Called when all engines serve it. True when it can be published again as the version served BEFORE."""

    async def rejoined(self, digests: Digests) -> None:
        """Called when engines of these serve it as others do; the services' groups are not used again."""

    async def leave(self, services: Collection[int]) -> None:
        """Called when a try failed for these alone."""

    async def drop(self, services: Collection[int]) -> bool:
        """Called when a try failed for all that it was for; the next one starts from nothing that it left.

        True when it goes another way.
        """


@dataclass(frozen=True, slots=True)
class Changed:
    """A delta that senders hold ready."""

    bucket_bytes: Sequence[int]
    """By stage."""
    whole_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(self.bucket_bytes)


class Changes:
    """What to send instead of the whole, where the run wants that and all rollout services have its base."""

    def __init__(self, ranks: RankGroup[RankWorker], *, seconds: float, is_wanted: bool) -> None:
        self._ranks = ranks
        self._seconds = seconds
        self._is_wanted = is_wanted
        self._digests: Digests = {}
        """Of the base."""

    async def found(self, services: Collection[int]) -> Changed | None:
        """None where the whole is sent, also because the delta would hardly be smaller."""
        if not (self._is_wanted and all(self._digests.get(service) for service in services)):
            return None
        stages = sorted(await self._ranks.gather(self._seconds, RankWorker.compare_weights), key=lambda s: s.stage)
        sizes = [stage.delta_bytes for stage in stages if stage.delta_bytes is not None]
        whole = sum(stage.whole_bytes for stage in stages)
        if len(sizes) < len(stages) or sum(sizes) > SMALLER * whole or max(sizes) > MAX_COLUMN_BYTES:
            log.info("whole_is_sent", why="too much of it changed", whole_bytes=whole)
            return None
        log.info("delta_is_sent", delta_bytes=sum(sizes), whole_bytes=whole)
        return Changed(sizes, whole)

    def deltas(self, services: Collection[int], *, to_base: bool = True, **fields: Any) -> dict[int, pb.Delta]:
        """What each service is told. Without `to_base` no engine has what the delta changes."""
        digests = self._digests if to_base else {}
        return {service: pb.Delta(base_digest=digests.get(service, ""), **fields) for service in services}

    async def accept(self, digests: Digests) -> None:
        """The current weights are served, and the base of the next delta."""
        if self._is_wanted:
            self._digests = {}
            await self._ranks.call(RankWorker.keep_weights)
            self._digests = dict(digests)

    def forget(self) -> None:
        """No service is told to have the base until weights are accepted again."""
        self._digests = {}

    def rejoined(self, digests: Digests) -> None:
        """These have the base, too."""
        if self._digests:
            self._digests = {**self._digests, **digests}


@dataclass(frozen=True, slots=True)
class SentByAll:
    """The checksums that engines must have, and why a stage could not send everything to some services."""

    checksums: Mapping[str, str]
    left: Mapping[int, str]


async def send_weights(
    ranks: RankGroup[RankWorker],
    publication_id: str,
    world_sizes: Mapping[int, int],
    *,
    kept: bool = False,
    delta: bool = False,
    deadline_seconds: float,
) -> SentByAll:
    """The checksums that engines must hold, once every stage has sent what it has, what it `kept`, or a `delta`.

    `world_sizes` are of the groups of each rollout service. Raises PublicationAborted when a stage could send to none
    of them, or not in time: the first failure stops all.
    """
    errors: list[str] = []

    def fail(why: str) -> None:
        errors.append(why)
        ranks.abort(publication_id)

    def hear(answer: asyncio.Future[Sent | None]) -> None:
        if not answer.cancelled() and answer.exception() is None and (sent := answer.result()) and sent.error:
            fail(f"stage {sent.stage}: {sent.error}")

    deadline = asyncio.get_running_loop().call_later(
        deadline_seconds, fail, f"weights were not sent within {deadline_seconds:g} s"
    )
    if delta:
        answers = ranks.ask(RankWorker.send_delta, publication_id, world_sizes)
    else:
        answers = ranks.ask(RankWorker.send_weights, publication_id, world_sizes, kept)
    for answer in answers:
        answer.add_done_callback(hear)
    try:
        await answers[0]
        sent = await results_of(answers, RankWorker.send_weights, deadline_seconds)
    finally:
        deadline.cancel()
    if errors:
        raise PublicationAborted(errors[0])
    left = {service: f"stage {stage.stage}: {why}" for stage in sent for service, why in stage.left.items()}
    return SentByAll(_checksums(sent), left)


def _checksums(sent: Sequence[Sent]) -> dict[str, str]:
    if failed := next((stage for stage in sent if stage.error), None):
        raise PublicationAborted(f"stage {failed.stage}: {failed.error}")
    return {name: checksum for stage in sent for name, checksum in stage.checksums.items()}


_MOST_DELTAS = 32


class CollectiveTransport:
    """Senders broadcast to the engines. With `keeps` they copy what is served into host memory, to send it again."""

    def __init__(
        self, ranks: RankGroup[RankWorker], *, seconds: float, keeps: bool, sends_deltas: bool = False
    ) -> None:
        self._ranks = ranks
        self._changes = Changes(ranks, seconds=seconds, is_wanted=sends_deltas)
        self._changed: Changed | None = None
        self._compared_for: Attempt | None = None
        self._seconds = seconds
        self._keeps = keeps or sends_deltas
        self._sends_deltas = sends_deltas
        self._made_plan: PublicationPlan | None = None
        self._plan_of_deltas: PublicationPlan

    async def prepare(self, attempt: Attempt, services: Collection[int]) -> Offer:
        """The senders listen."""
        if self._compared_for is not attempt:
            self._compared_for = attempt
            self._changed = await self._changes.found(services) if attempt.source is Source.NEW else None
        plan = await self._plan()
        groups = {
            service: plan.groups(await self._ranks.gather(self._seconds, RankWorker.open_group, service))
            for service in services
        }
        if self._changed is None:
            return Offer(pb.TRANSPORT_COLLECTIVE, plan.manifest, groups)
        deltas = self._changes.deltas(services, bucket_bytes=self._changed.bucket_bytes)
        return Offer(pb.TRANSPORT_COLLECTIVE, plan.manifest, groups, deltas=deltas)

    async def deliver(
        self, attempt: Attempt, recipients: Recipients, begun: Mapping[int, pb.BeginPublishResponse]
    ) -> Mapping[str, str]:
        """Senders join their groups and broadcast, while engines are asked to receive."""
        sending = asyncio.create_task(
            send_weights(
                self._ranks,
                attempt.publication_id,
                {service: reply.world_size for service, reply in begun.items()},
                kept=attempt.source is Source.BEFORE,
                delta=self._changed is not None,
                deadline_seconds=self._seconds,
            )
        )
        num_buckets = (await self._plan()).num_buckets
        offering = asyncio.create_task(self._offer(attempt.publication_id, recipients, num_buckets))
        try:
            # Either side may fail while the other waits for it: the first failure ends both.
            done, _ = await asyncio.wait({offering, sending}, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except HeadraceError:
            self._ranks.abort(attempt.publication_id)
            raise
        finally:
            offering.cancel()
            with suppress(HeadraceError):  # raised above, or what the abort brought
                sent = await sending
        for service, why in sent.left.items():
            recipients.leave(service, PublicationAborted(why))
        recipients.require_any()
        return sent.checksums

    async def accept(self, attempt: Attempt, digests: Digests) -> bool:
        await self._changes.accept(digests)
        if self._keeps and not self._sends_deltas:
            await self._ranks.call(RankWorker.keep_weights)
        return self._keeps

    async def rejoined(self, digests: Digests) -> None:
        self._changes.rejoined(digests)
        await self._ranks.call(RankWorker.drop_groups, list(digests))  # the group of a few engines serves once

    async def leave(self, services: Collection[int]) -> None:
        await self._ranks.call(RankWorker.drop_groups, list(services))

    async def drop(self, services: Collection[int]) -> bool:
        """True where all weights are broadcast next, because engines lack those that a delta changes."""
        had_delta = self._changed is not None
        if had_delta:
            self._changed = None
            self._changes.forget()
        await self._ranks.call(RankWorker.drop_groups, list(services))
        return had_delta

    async def _offer(self, publication_id: str, recipients: Recipients, num_buckets: int) -> None:
        """Asks engines to receive one bucket after the other; senders go on without a service that fails."""
        for bucket in range(num_buckets):
            await recipients.each(partial(self._offer_one, publication_id, bucket))
            for service in recipients.left:
                self._ranks.abort(part_of(publication_id, service))

    async def _offer_one(self, publication_id: str, bucket: int, _: int, client: RolloutClient) -> None:
        await client.publish_bucket(publication_id, bucket, deadline_seconds=self._seconds)

    async def _plan(self) -> PublicationPlan:
        """Made for the first publication: a large model has tens of thousands of tensors."""
        if self._made_plan is None:
            stages = await self._ranks.gather(self._seconds, RankWorker.describe_weights)
            self._made_plan = PublicationPlan.of(stages)
            self._plan_of_deltas = PublicationPlan.of([_in_one_bucket(stage) for stage in stages])
        return self._made_plan if self._changed is None else self._plan_of_deltas


def _in_one_bucket(stage: StageWeights) -> StageWeights:
    return StageWeights(stage.stage, [[spec for bucket in stage.buckets for spec in bucket]])


_OWN = re.compile(r"\.?e(\d+)-v\d+-[0-9a-f]{8}(\.draft)?")
"""A version's folder, and what a trainer that died has left of one: the epoch is in its name."""
_NOTED = re.compile(r'"publication_id": "([^"]+)"')
_SEGMENTS = re.compile(r"\.e(\d+)\.segments")
"""The shared memory of an epoch's trainer."""


@dataclass(frozen=True, slots=True)
class Written:
    """A version in its folder. `checksums` is None as long as its senders still compute them."""

    folder: Path
    policy_version: int
    checksums: Mapping[str, str] | None
    base: Sequence[Path] = ()
    """Of a delta: the folders that an engine loads before it, the first of them whole."""
    base_bytes: int = 0
    """Of the deltas among them, and of itself if it is one."""


class DiskTransport:
    """Folders below `root`, at most two of them whole at a time: the served one and the one that is published.

    Of `kind` IPC that is shared memory. Senders compute checksums of it and of deltas while engines load, but not on
    shared devices, which they leave before.
    """

    def __init__(
        self,
        ranks: RankGroup[RankWorker],
        root: Path,
        devices: Devices,
        *,
        seconds: float,
        kind: pb.Transport.ValueType = pb.TRANSPORT_DISK,
        written: Path | None = None,
        sends_deltas: bool = False,
    ) -> None:
        """`written` is the file in which this run notes its versions; None where no other run writes below `root`."""
        self._ranks = ranks
        self._changes = Changes(ranks, seconds=seconds, is_wanted=sends_deltas)
        self._root = root
        self._devices = devices
        self._seconds = seconds
        self._kind = kind
        self._in_memory = kind == pb.TRANSPORT_IPC
        self._written = written
        self._deleting = ThreadPoolExecutor(1, thread_name_prefix="old-weights")
        self._manifest: pb.Manifest | None = None
        self._served: Written | None = None
        self._offered: Written | None = None
        self._is_doubted = False
        self._epoch = 0

    async def prepare(self, attempt: Attempt, services: Collection[int]) -> Offer:
        """The version lies in its folder, whole and durable."""
        if self._manifest is None:
            stages = await self._ranks.gather(self._seconds, RankWorker.describe_weights)
            self._manifest = PublicationPlan.in_one_bucket(stages)
        self._epoch = attempt.epoch
        lies_there = self._lies_there(attempt)
        self._offered = offered = lies_there or await self._write(attempt, services)
        deltas: Mapping[int, pb.Delta] = {}
        if offered.base:
            base_paths = [str(folder) for folder in offered.base]
            deltas = self._changes.deltas(services, base_paths=base_paths, to_base=lies_there is None)
        return Offer(self._kind, self._manifest, disk_path=str(offered.folder), deltas=deltas)

    async def deliver(
        self, attempt: Attempt, recipients: Recipients, begun: Mapping[int, pb.BeginPublishResponse]
    ) -> Mapping[str, str]:
        assert self._offered is not None, "prepare comes first"
        await recipients.each(
            lambda _, client: client.publish_bucket(attempt.publication_id, 0, deadline_seconds=self._seconds)
        )
        if self._offered.checksums is None:
            sent = await send_weights(
                self._ranks, attempt.publication_id, {}, kept=True, deadline_seconds=self._seconds
            )
            self._offered = replace(self._offered, checksums=sent.checksums)
        assert self._offered.checksums is not None, "set above"
        return self._offered.checksums

    async def accept(self, attempt: Attempt, digests: Digests) -> bool:
        """Makes the folder of this attempt the served one."""
        await self._serve_offered()
        await self._changes.accept(digests)
        return self._served is not None  # else engines had loaded it themselves

    async def rejoined(self, digests: Digests) -> None:
        self._changes.rejoined(digests)
        await self._serve_offered()

    async def leave(self, services: Collection[int]) -> None:
        """The others load what lies there."""

    async def drop(self, services: Collection[int]) -> bool:
        """A served folder that could not be loaded is written again for the engines that come back next.

        The whole is written where a delta could not be.
        """
        if self._offered is not self._served:
            self._changes.forget()
        if self._offered is not None and self._offered is self._served:
            self._is_doubted = True
        self._offered = None
        await self._sweep()
        return False

    def _lies_there(self, attempt: Attempt) -> Written | None:
        if attempt.source is Source.NEW or self._served is None:
            return None
        if attempt.source is Source.SERVED and self._is_doubted:
            return None
        return self._served if self._served.policy_version == attempt.policy_version else None

    async def _write(self, attempt: Attempt, services: Collection[int]) -> Written:
        assert attempt.source is not Source.BEFORE, "the model has newer weights than those"
        await self._devices.take()
        await self._sweep()  # what a trainer that died has left may be what fills the disk
        if self._written is not None:
            await asyncio.to_thread(_note, self._written, attempt.publication_id)
        changed, base, base_bytes = await self._changed(attempt, services)
        writing = send_weights(
            self._ranks, attempt.publication_id, {}, delta=changed is not None, deadline_seconds=self._seconds
        )
        try:
            sent = await asyncio.wait_for(writing, 2 * self._seconds)  # only a disk that hangs takes so long
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"weights were not written below {self._root} within {2 * self._seconds:g} s, and its disk does not "
                "answer: name a folder on another disk with --update-weight-disk-path"
            ) from error
        is_said_later = changed is not None or (self._in_memory and not self._devices.is_shared)
        known = None if is_said_later else sent.checksums
        return Written(self._root / attempt.publication_id, attempt.policy_version, known, base, base_bytes)

    async def _changed(self, attempt: Attempt, services: Collection[int]) -> tuple[Changed | None, Sequence[Path], int]:
        """A delta with its base, unless so many lie there that engines without the base had better load the whole."""
        served = self._served
        if attempt.source is not Source.NEW or served is None or len(served.base) >= _MOST_DELTAS:
            return None, (), 0
        changed = await self._changes.found(services)
        if changed is None or served.base_bytes + changed.num_bytes > changed.whole_bytes:
            return None, (), 0
        return changed, (*served.base, served.folder), served.base_bytes + changed.num_bytes

    async def _serve_offered(self) -> None:
        self._served, self._offered, self._is_doubted = self._offered, None, False
        await self._sweep()

    async def _sweep(self) -> None:
        """Deletes what no engine needs. What cannot be deleted in time stays, with a warning."""
        versions = [written for written in (self._served, self._offered) if written is not None]
        needed = {folder.name for written in versions for folder in (*written.base, written.folder)}
        try:
            work = partial(sweep, self._root, needed, self._epoch, self._written)
            await asyncio.wait_for(asyncio.get_running_loop().run_in_executor(self._deleting, work), self._seconds)
        except (TimeoutError, OSError) as error:
            log.warning("old_weights_kept", folder=str(self._root), error=str(error) or "the disk does not answer")


def sweep(root: Path, needed: Collection[str], epoch: int, written: Path | None = None) -> None:
    """Deletes versions that are not `needed`, of this epoch and of older ones: a newer trainer has its own.

    With `written` only those that this file notes.
    """
    own = None if written is None else _noted(written)
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        found, segments = _OWN.fullmatch(path.name), _SEGMENTS.fullmatch(path.name)
        is_own = own is None or path.name.removeprefix(".").removesuffix(".draft") in own
        if found and is_own and path.name not in needed and int(found[1]) <= epoch:
            remove(path)
        if segments and int(segments[1]) < epoch:
            remove(path)


def _note(written: Path, publication_id: str) -> None:
    try:
        append_rows(written, [{"publication_id": publication_id}])
    except OSError as error:
        raise DiskFull(
            f"the version that is published next cannot be noted in {written}: {error.strerror}: make room there"
        ) from error


def _noted(written: Path) -> set[str]:
    try:
        return set(_NOTED.findall(written.read_text(errors="replace")))
    except FileNotFoundError:
        return set()


_OF_CHECKPOINT = 0
"""The version of the weights in hf_checkpoint."""


class LoadedFirst:
    """Compares the weights that a run begins with with those that engines have loaded themselves.

    Only where they differ does the `other` transport bring them, as it brings all later ones.
    """

    def __init__(self, ranks: RankGroup[RankWorker], other: Transport, *, seconds: float) -> None:
        self._ranks = ranks
        self._other = other
        self._seconds = seconds
        self._may_be_loaded = True
        self._loaded: Mapping[str, str] | None = None

    async def prepare(self, attempt: Attempt, services: Collection[int]) -> Offer:
        is_first = attempt.source is Source.NEW and attempt.policy_version == _OF_CHECKPOINT
        if not (self._may_be_loaded and is_first):
            self._may_be_loaded = False
            return await self._other.prepare(attempt, services)
        self._loaded = _checksums(await self._ranks.gather(self._seconds, RankWorker.hash_weights))
        stages = await self._ranks.gather(self._seconds, RankWorker.describe_weights)
        return Offer(pb.TRANSPORT_LOADED, PublicationPlan.in_one_bucket(stages))

    async def deliver(
        self, attempt: Attempt, recipients: Recipients, begun: Mapping[int, pb.BeginPublishResponse]
    ) -> Mapping[str, str]:
        """Nothing is brought to engines that have it."""
        return self._loaded if self._loaded is not None else await self._other.deliver(attempt, recipients, begun)

    async def accept(self, attempt: Attempt, digests: Digests) -> bool:
        self._may_be_loaded, self._loaded = False, None
        return await self._other.accept(attempt, digests)

    async def rejoined(self, digests: Digests) -> None:
        await self._other.rejoined(digests)

    async def leave(self, services: Collection[int]) -> None:
        await self._other.leave(services)

    async def drop(self, services: Collection[int]) -> bool:
        """True when engines had loaded other weights than the run begins with."""
        had_loaded = self._loaded is not None
        self._may_be_loaded, self._loaded = False, None
        return had_loaded or await self._other.drop(services)


def transport_of(
    config: PublishSection,
    ranks: RankGroup[RankWorker],
    root: Path,
    *,
    hashes: bool,
    devices: Devices,
    written: Path | None = None,
) -> Transport:
    """`root` is where versions lie that travel through files; `hashes` when ranks know what engines print.

    `written` is where the run notes its versions if other runs may write below `root`.
    """
    seconds, deltas = config.update_weight_timeout_seconds, config.update_weight_delta
    other: Transport
    match config.update_weight_transport:
        case "auto" | "collective":
            keeps = config.update_weight_rollback == "host"
            other = CollectiveTransport(ranks, seconds=seconds, keeps=keeps, sends_deltas=deltas)
        case "ipc":
            other = DiskTransport(ranks, root, devices, seconds=seconds, kind=pb.TRANSPORT_IPC)
        case "disk" | "adapter" as way:
            kind = pb.TRANSPORT_DISK if way == "disk" else pb.TRANSPORT_ADAPTER
            return DiskTransport(ranks, root, devices, seconds=seconds, kind=kind, written=written, sends_deltas=deltas)
    return LoadedFirst(ranks, other, seconds=seconds) if hashes and not devices.is_shared else other
