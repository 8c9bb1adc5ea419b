"""Stands in for engines where a run has none."""

from __future__ import annotations

from typing import Protocol

from services.trainer.state import TrainState
from services.trainer.weights.lacking import NOBODY, EngineIds, Lacking


class Publications(Protocol):
    """Gives the current weights to those that generate with them."""

    async def publish(self, state: TrainState) -> dict[str, float]:
        """Returns figures once every engine serves `state.step`."""

    async def lacking(self, state: TrainState) -> Lacking:
        """The engines that do not serve the policy version."""

    async def rejoin(self, state: TrainState, engine_ids: EngineIds) -> None:
        """Gives engines that came back the served weights."""


class NoEngines:
    """Publishes to nobody, which takes no time."""

    async def publish(self, state: TrainState) -> dict[str, float]:
        return {}

    async def lacking(self, state: TrainState) -> Lacking:
        return NOBODY

    async def rejoin(self, state: TrainState, engine_ids: EngineIds) -> None: ...
