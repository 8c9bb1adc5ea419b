"""The commands of rank 0 to all ranks, and their answers. Every rank runs the same commands in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from headrace.publication import TensorSpec
from services.trainer.plan.batch import SampleFacts

if TYPE_CHECKING:
    from services.trainer.data.samples import UnusableSample


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Train(_Message, frozen=True):
    """Every rank trains one rollout step."""

    step: int
    samples: tuple[SampleFacts, ...]


class Prefetch(_Message, frozen=True):
    """Each rank begins to fetch its part of the next rollout step."""

    samples: tuple[SampleFacts, ...]


class DescribeWeights(_Message, frozen=True):
    """Each sender says what it will send at every publication."""


class OpenGroups(_Message, frozen=True):
    """Each sender listens for its group of a rollout service's engines; a group that lives on is kept."""

    service: int = 0


class ProbeWeights(_Message, frozen=True):
    """The last stage says what engines must compute under the current weights."""


class SendWeights(_Message, frozen=True):
    """Senders join their groups and broadcast their buckets, of the current weights or of those that they kept."""

    publication_id: str
    world_sizes: dict[int, int]
    """Processes in the groups of each rollout service, the sender included"""
    kept: bool = False


class HashWeights(_Message, frozen=True):
    """Each sender says what engines print over the current weights."""


class KeepWeights(_Message, frozen=True):
    """Each sender copies the current weights into host memory: they are served now."""


class DropGroups(_Message, frozen=True):
    """A publication to these rollout services failed: its groups are torn down."""

    services: tuple[int, ...] = (0,)


class ToHost(_Message, frozen=True):
    """Every rank's memory leaves its device."""


class ToDevice(_Message, frozen=True):
    """It comes back."""


class Save(_Message, frozen=True):
    """Every rank writes its share of a checkpoint."""

    step: int
    policy_version: int
    epoch: int


class Export(_Message, frozen=True):
    """A Hugging Face folder."""

    path: str


class Leave(_Message, frozen=True):
    """The end of the run."""


Command = (
    Train
    | Prefetch
    | DescribeWeights
    | OpenGroups
    | ProbeWeights
    | SendWeights
    | HashWeights
    | KeepWeights
    | DropGroups
    | ToHost
    | ToDevice
    | Save
    | Export
    | Leave
)


@dataclass(frozen=True, slots=True)
class Trained:
    """Metrics of a step, and the samples that it could not use. Rank 0's own; it does not travel."""

    metrics: dict[str, float]
    set_aside: Sequence[UnusableSample]
    is_logged: bool = False
    """A user's function has logged the rollout: trackers are not given its figures as well."""


class StageWeights(_Message, frozen=True):
    """One stage's tensors, in the order in which they travel."""

    stage: int
    buckets: list[list[TensorSpec]]


class StageGroup(_Message, frozen=True):
    """The group of engines of one stage: its name, and the address at which its sender listens."""

    stage: int
    name: str
    host: str
    port: int
    joined: bool


class Probed(_Message, frozen=True):
    """The probe as the last stage computed it."""

    tokens: list[int]
    log_probs: list[float]


class Sent(_Message, frozen=True):
    """One stage's share of a publication: what engines must hold now, or why it failed."""

    stage: int
    checksums: dict[str, str]
    error: str | None = None
    left: dict[int, str] = {}  # msgspec copies it
    """Rollout services that could not be sent all of it while others could, and why"""


Result = StageWeights | StageGroup | Probed | Sent | None


_commands = msgspec.msgpack.Decoder(Command)
_results = msgspec.msgpack.Decoder(Result)


def part_of(publication_id: str, service: int) -> str:
    """The name under which a publication is given up for one of its rollout services alone."""
    return f"{publication_id}/{service}"


def packed(found: Command | Result) -> msgspec.Raw:
    """The message as MessagePack, to travel in an order or an answer."""
    return msgspec.Raw(msgspec.msgpack.encode(found))


def command_of(data: msgspec.Raw) -> Command:
    """Raises msgspec.MsgspecError for what is none."""
    command: Command = _commands.decode(data)
    return command


def result_of(data: msgspec.Raw) -> Result:
    """Raises msgspec.MsgspecError for what is none."""
    result: Result = _results.decode(data)
    return result
