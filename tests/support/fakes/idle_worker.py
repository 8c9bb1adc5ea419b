"""A rank that carries out every command at once, and has nothing to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.trainer.control.senders import Probed, Sent, StageGroup, StageWeights
from services.trainer.control.worker import RankWorker, Trained
from services.trainer.plan.batch import SampleFacts


class IdleWorker(RankWorker):
    """Tests override what they look at."""

    def __init__(self) -> None: ...

    def train(self, step: int, samples: Sequence[SampleFacts]) -> Trained:
        return Trained({}, ())

    def prefetch(self, samples: Sequence[SampleFacts]) -> None: ...

    def describe_weights(self) -> StageWeights | None: ...

    def open_group(self, service: int) -> StageGroup | None: ...

    def probe(self) -> Probed | None:
        return Probed([1, 2], [-0.5])

    def send_weights(self, publication_id: str, world_sizes: Mapping[int, int], kept: bool = False) -> Sent | None: ...

    def hash_weights(self) -> Sent | None: ...

    def keep_weights(self) -> None: ...

    def drop_groups(self, services: Sequence[int]) -> None: ...

    def to_host(self) -> None: ...

    def to_device(self) -> None: ...

    def save(self, step: int, policy_version: int, epoch: int) -> None: ...

    def export(self, path: str) -> None: ...

    def leave(self) -> None: ...
