"""The part of a publication that depends on how weights come; the rest of the transaction is the same for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.rollout.engine.fleet import Engine
from services.rollout.publication.publication import Publication
from services.rollout.publication.state import Plan


class Inbound(Protocol):
    """One object serves all publications that come this way."""

    def require_usable(self, plan: Plan, engines: Sequence[Engine]) -> None:
        """Raises GroupGone or FailedPrecondition before any engine notices the publication."""

    async def ready(self, publication: Publication) -> None:
        """Does what can be done while requests go on. Raises what keeps the weights from coming."""

    async def open(self, publication: Publication, engine: Engine) -> None:
        """Called for each engine once it is paused."""

    async def receive(self, publication: Publication, bucket: int) -> None:
        """Returns when every engine that still takes part has the bucket. Raises PublicationAborted."""

    async def close(self, publication: Publication, engine: Engine) -> None:
        """Undoes `open`, after the last bucket or an abort; does nothing where `open` was not called."""

    async def finish(self, publication: Publication) -> None:
        """Called at a commit."""

    def release(self, plan: Plan) -> None:
        """Called at an abort, before its engines `leave`."""

    async def leave(self, plan: Plan, engine: Engine) -> None:
        """Called for each engine after an abort."""
