"""Weights that engines loaded themselves when they started: nothing comes, and no engine stands still."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import FailedPrecondition
from services.rollout.engine.fleet import Engine, EngineState
from services.rollout.publication.publication import Publication
from services.rollout.publication.state import Plan


class LoadedInbound:
    """Serves engines that no publication has touched."""

    def require_usable(self, plan: Plan, engines: Sequence[Engine]) -> None:
        """Raises FailedPrecondition where an engine has been given weights since it started."""
        given = [e.engine_id for e in engines if e.weights_digest or e.state is not EngineState.READY]
        if given:
            raise FailedPrecondition(f"{given} hold other weights than those that they loaded: send the weights")

    async def ready(self, publication: Publication) -> None:
        """Nothing comes."""

    async def open(self, publication: Publication, engine: Engine) -> None:
        """Nothing comes."""

    async def receive(self, publication: Publication, bucket: int) -> None:
        """Its plan has no bucket."""

    async def close(self, publication: Publication, engine: Engine) -> None:
        """Nothing was opened."""

    async def finish(self, publication: Publication) -> None:
        """Nothing is left."""

    def release(self, plan: Plan) -> None:
        """Nothing is remembered."""

    async def leave(self, plan: Plan, engine: Engine) -> None:
        """No engine was bound to anything."""
