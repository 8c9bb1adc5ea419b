"""What rank 0 asks all ranks to do together, as JSON. Every rank runs the same commands in the same order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from services.trainer.plan.batch import SampleFacts


@dataclass(frozen=True, slots=True)
class Train:
    """One rollout step."""

    step: int
    samples: Sequence[SampleFacts]


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Each rank begins to fetch its part of the next rollout step."""

    samples: Sequence[SampleFacts]


@dataclass(frozen=True, slots=True)
class OpenGroups:
    """Each sender listens for its group of engines; a group that lives on is kept."""

    publication_id: str


@dataclass(frozen=True, slots=True)
class SendWeights:
    """Senders join their groups and broadcast their buckets."""

    publication_id: str
    world_size: int


@dataclass(frozen=True, slots=True)
class DropGroups:
    """A publication failed: its groups are torn down."""


@dataclass(frozen=True, slots=True)
class Save:
    """A checkpoint."""

    step: int
    policy_version: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Export:
    """A Hugging Face folder."""

    path: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The end of the run."""


Command = Train | Prefetch | OpenGroups | SendWeights | DropGroups | Save | Export | Leave
_BY_NAME: dict[str, type[Command]] = {
    c.__name__: c for c in (Train, Prefetch, OpenGroups, SendWeights, DropGroups, Save, Export, Leave)
}


def encode(command: Command) -> bytes:
    """JSON with the command's name."""
    return json.dumps({"command": type(command).__name__, **asdict(command)}).encode()


def decode(data: bytes) -> Command:
    """The command behind `encode`."""
    fields = json.loads(data)
    kind = _BY_NAME[fields.pop("command")]
    if kind in (Train, Prefetch):
        fields["samples"] = tuple(SampleFacts(**facts) for facts in fields["samples"])
    return kind(**fields)
