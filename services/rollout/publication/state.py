"""The state of one publication, without engines, clock or wire.

  OPEN ──(every bucket received: engines go on, unverified)──► OPEN ──commit──► COMMITTED
    └───────────── abort, deadline, no engine left ──► ABORTED
Engines are dirty from the first bucket on: they hold neither the old weights nor, before the commit, the new ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from headrace.errors import FailedPrecondition, Fenced, InvalidArgument, PublicationAborted
from headrace.publication import TensorSpec


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A collective group and the buckets that are sent in it."""

    name: str
    master_address: str
    master_port: int
    buckets: tuple[int, ...]
    joined: bool = False
    """The sender joined it in an earlier publication."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What comes are changes of a base that engines have."""

    base_digest: str
    """What was answered when the base was committed; empty: no engine has it."""
    bucket_bytes: Sequence[int] = ()
    """Of each bucket that is broadcast."""
    base_folders: Sequence[Path] = ()
    """The base as folders, for engines without it, in the order in which they are loaded."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A publication's plan, from BeginPublish. Raises InvalidArgument when its parts contradict each other."""

    publication_id: str
    epoch: int
    policy_version: int
    pause_mode: str
    backend: str
    deadline_seconds: float
    buckets: Mapping[int, Sequence[TensorSpec]]
    groups: Sequence[GroupPlan]
    engine_ids: Sequence[str] = ()
    """The engines that came back without the served weights; empty: all engines."""
    folder: Path | None = None
    """The folder from which bucket 0, the only one, is loaded; None: buckets are broadcast in groups."""
    is_loaded: bool = False
    """Engines have loaded the weights themselves: nothing travels."""
    is_adapter: bool = False
    """The folder has an adapter, which engines load beside what they serve."""
    delta: Delta | None = None
    """None: what comes is whole."""

    def __post_init__(self) -> None:
        if not self.publication_id:
            raise InvalidArgument("publication_id is empty", field="publication_id")
        if not self.deadline_seconds > 0:
            raise InvalidArgument(
                f"deadline_seconds is {self.deadline_seconds:g}, must be above 0", field="deadline_seconds"
            )
        sent = sorted(bucket for group in self.groups for bucket in group.buckets)
        if self.delta is not None:
            self._check_delta(self.delta)
        if self.folder is not None:
            if self.groups or list(self.buckets) != [0]:
                raise InvalidArgument(
                    f"a folder holds one bucket, 0, and belongs to no group, not buckets {_some(self.buckets)} and "
                    f"{len(self.groups)} groups",
                    field="disk_path",
                )
        elif self.is_loaded:
            if self.groups or self.engine_ids:
                raise InvalidArgument(
                    f"weights that engines have loaded are all engines' and belong to no group, not {len(self.groups)} "
                    f"groups and {len(self.engine_ids)} engines",
                    field="transport",
                )
        elif not self.buckets or sent != sorted(self.buckets):
            raise InvalidArgument(
                f"groups send buckets {_some(sent)}, the manifest has {_some(self.buckets)}: each one exactly once",
                field="groups",
            )

    def _check_delta(self, delta: Delta) -> None:
        if self.is_loaded or self.is_adapter:
            raise InvalidArgument("a delta is broadcast or lies in a folder", field="delta")
        if self.folder is None and (self.engine_ids or len(delta.bucket_bytes) != len(self.buckets)):
            raise InvalidArgument(
                f"a delta of {len(delta.bucket_bytes)} buckets for {len(self.buckets)} in the manifest and "
                f"{len(self.engine_ids)} engines alone: each bucket has its bytes, and single engines get the whole",
                field="delta.bucket_bytes",
            )
        if self.folder is not None and not delta.base_folders:
            raise InvalidArgument("a delta in a folder without its base", field="delta.base_paths")

    @property
    def leaves_served(self) -> bool:
        """What engines serve stays in them until the commit: none stands still, and an abort costs nothing."""
        return self.is_loaded or self.is_adapter

    @property
    def group_names(self) -> list[str]:
        return [group.name for group in self.groups]

    def require_bucket(self, bucket: int) -> None:
        """Raises InvalidArgument for a bucket that the manifest does not have, and where nothing travels."""
        if self.is_loaded:
            raise InvalidArgument("engines have loaded these weights themselves: commit them", field="bucket")
        if bucket not in self.buckets:
            raise InvalidArgument(f"bucket {bucket} is not one of {_some(self.buckets)}", field="bucket")

    def group_of(self, bucket: int) -> GroupPlan:
        """Returns the group in which the bucket is sent."""
        return next(group for group in self.groups if bucket in group.buckets)


def _some(buckets: Iterable[int]) -> str:
    numbers = sorted(buckets)
    return f"{numbers[:20]} and {len(numbers) - 20} more" if len(numbers) > 20 else str(numbers)


class Phase(StrEnum):
    """The phase of a publication."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(slots=True)
class PublicationState:
    """One publication and its engines."""

    plan: Plan
    engine_ids: tuple[str, ...]
    phase: Phase = Phase.OPEN
    received: set[int] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    dirty: bool = False
    why_aborted: str = ""

    @property
    def remaining(self) -> list[str]:
        """The engines that still take part."""
        return [engine_id for engine_id in self.engine_ids if engine_id not in self.lost]

    @property
    def is_complete(self) -> bool:
        """True when every bucket was received."""
        return not self._missing

    @property
    def _missing(self) -> set[int]:
        return set() if self.plan.is_loaded else self.plan.buckets.keys() - self.received

    def require_open(self) -> None:
        """Raises PublicationAborted or FailedPrecondition unless it is open."""
        if self.phase is Phase.ABORTED:
            raise PublicationAborted(f"publication {self.plan.publication_id} was aborted: {self.why_aborted}")
        if self.phase is Phase.COMMITTED:
            raise FailedPrecondition(f"publication {self.plan.publication_id} is committed already")

    def mark_dirty(self, bucket: int) -> None:
        """Call it before a bucket is received: from then on engines hold a mixture, unless what they serve stays."""
        self.require_open()
        self.plan.require_bucket(bucket)
        self.dirty = not self.plan.leaves_served

    def lose(self, engine_id: str, why: str) -> None:
        """Takes an engine out. Raises PublicationAborted when it was the last one."""
        self.lost.setdefault(engine_id, why)
        if not self.remaining:
            self.abort(f"no engine remains: {self.lost}")
            self.require_open()

    def require_complete(self) -> None:
        """Raises FailedPrecondition while buckets are missing."""
        self.require_open()
        if missing := self._missing:
            raise FailedPrecondition(
                f"publication {self.plan.publication_id} lacks buckets {_some(missing)}: send them before the commit"
            )

    def commit(self) -> None:
        self.require_complete()
        self.phase = Phase.COMMITTED

    def abort(self, why: str) -> bool:
        """Returns False when it has ended already."""
        if self.phase is not Phase.OPEN:
            return False
        self.phase, self.why_aborted = Phase.ABORTED, why
        return True


class EpochFence:
    """Refuses trainer epochs older than the newest one seen."""

    def __init__(self) -> None:
        self._epoch = 0

    def check(self, epoch: int) -> None:
        """Raises Fenced for an older epoch."""
        if epoch < self._epoch:
            raise Fenced(f"epoch {epoch} is over: epoch {self._epoch} has begun; stop this trainer")
        self._epoch = epoch
