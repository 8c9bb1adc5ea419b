"""Weights that lie in a folder, on a disk or in shared memory, from which every engine loads them when it is told to.

A version is written before engines know of it, so they stand still only while they load. The folder of the version that
is served stays: engines that come back load it, and so do all of them when a later version fails. A folder has its name
from its publication, and has it only once it is whole; what is neither served nor being published is deleted. Several
runs may write into one folder: each deletes only versions that it has noted in its own folder.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import DeadlineExceeded, DiskFull
from headrace.rpc.log import log
from services.trainer.control.publication_plan import PublicationPlan
from services.trainer.control.rank_group import RankGroup
from services.trainer.control.rollout.recipients import Recipients
from services.trainer.control.transport.port import Attempt, Offer, Source
from services.trainer.devices.turns import Devices
from services.trainer.files.durable import remove
from services.trainer.files.durable_rows import append_rows

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


class DiskTransport:
    """Folders below `root`, at most two of them whole at a time: the served one and the one that is published.

    With `in_memory` that is shared memory: senders compute checksums while engines load, but not on shared devices,
    which they leave before.
    """

    def __init__(
        self,
        ranks: RankGroup,
        root: Path,
        devices: Devices,
        *,
        seconds: float,
        in_memory: bool = False,
        written: Path | None = None,
    ) -> None:
        """`written` is the file in which this run notes its versions; None where no other run writes below `root`."""
        self._ranks = ranks
        self._root = root
        self._devices = devices
        self._seconds = seconds
        self._in_memory = in_memory
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
            stages = await self._ranks.describe_weights(deadline_seconds=self._seconds)
            self._manifest = PublicationPlan.in_one_bucket(stages)
        self._epoch = attempt.epoch
        self._offered = self._lies_there(attempt) or await self._write(attempt)
        transport = pb.TRANSPORT_IPC if self._in_memory else pb.TRANSPORT_DISK
        return Offer(transport, self._manifest, disk_path=str(self._offered.folder))

    async def deliver(
        self, attempt: Attempt, recipients: Recipients, begun: Mapping[int, pb.BeginPublishResponse]
    ) -> Mapping[str, str]:
        assert self._offered is not None, "prepare comes first"
        await recipients.each(
            lambda _, client: client.publish_bucket(attempt.publication_id, 0, deadline_seconds=self._seconds)
        )
        if self._offered.checksums is None:
            sent = await self._ranks.send_weights(attempt.publication_id, {}, kept=True, deadline_seconds=self._seconds)
            self._offered = replace(self._offered, checksums=sent.checksums)
        assert self._offered.checksums is not None, "set above"
        return self._offered.checksums

    async def accept(self, attempt: Attempt) -> bool:
        """Makes the folder of this attempt the served one."""
        await self._serve_offered()
        return True

    async def rejoined(self, services: Collection[int]) -> None:
        await self._serve_offered()

    async def leave(self, services: Collection[int]) -> None:
        """The others load what lies there."""

    async def drop(self, services: Collection[int]) -> bool:
        """A served folder that could not be loaded is written again for the engines that come back next."""
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

    async def _write(self, attempt: Attempt) -> Written:
        assert attempt.source is not Source.BEFORE, "the model has newer weights than those"
        await self._devices.take()
        await self._sweep()  # what a trainer that died has left may be what fills the disk
        if self._written is not None:
            await asyncio.to_thread(_note, self._written, attempt.publication_id)
        writing = self._ranks.send_weights(attempt.publication_id, {}, deadline_seconds=self._seconds)
        try:
            sent = await asyncio.wait_for(writing, 2 * self._seconds)  # only a disk that hangs takes so long
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"weights were not written below {self._root} within {2 * self._seconds:g} s, and its disk does not "
                "answer: name a folder on another disk with --update-weight-disk-path"
            ) from error
        known = None if self._in_memory and not self._devices.is_shared else sent.checksums
        return Written(self._root / attempt.publication_id, attempt.policy_version, known)

    async def _serve_offered(self) -> None:
        self._served, self._offered, self._is_doubted = self._offered, None, False
        await self._sweep()

    async def _sweep(self) -> None:
        """Deletes what no engine needs. What cannot be deleted in time stays, with a warning."""
        needed = {written.folder.name for written in (self._served, self._offered) if written is not None}
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
