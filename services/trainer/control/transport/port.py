"""The part of a publication that depends on how weights go, on rank 0 and on every rank; all else is the same."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from headrace.api.rollout.v1 import rollout_pb2 as pb
from services.trainer.control.messages import Probed, Sent, StageGroup, StageWeights
from services.trainer.control.rollout.recipients import Recipients


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

    async def accept(self, attempt: Attempt) -> bool:
        """Called when all engines serve it. True when it can be published again as the version served BEFORE."""

    async def rejoined(self, services: Collection[int]) -> None:
        """Called when engines of these serve it as others do; the groups of `services` are not used again."""

    async def leave(self, services: Collection[int]) -> None:
        """Called when a try failed for these alone."""

    async def drop(self, services: Collection[int]) -> bool:
        """Called when a try failed for all that it was for; the next one starts from nothing that it left.

        True when it goes another way.
        """


class Sender(Protocol):
    """One rank's part, in its compute thread."""

    def describe(self) -> StageWeights | None:
        """This stage's weights, the same at every publication; None on ranks that send nothing."""

    def probe(self) -> Probed | None:
        """Collective: what engines must compute; None except on the last stage's sender."""

    def open(self, service: int) -> StageGroup | None:
        """The address at which this stage's group of a rollout service's engines listens; None where there is none."""

    def hashed(self) -> Sent | None:
        """Collective: what engines print over the current weights; None on ranks that send nothing."""

    def keep(self) -> None:
        """Collective: copies the current weights, to send them again."""

    def send(self, publication_id: str, world_sizes: Mapping[int, int], *, kept: bool = False) -> Sent | None:
        """Collective. An error is in the answer; None on ranks that send nothing."""

    def drop(self, services: Collection[int]) -> None:
        """Tears down what a failed publication to these rollout services left."""
