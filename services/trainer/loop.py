"""The training loop.

It waits for a full batch, trains on it, tells the ledger, gives the weights to the engines, and saves. Consumed is not
committed: what a checkpoint does not cover comes back, in the same batches, when a trainer starts again. A checkpoint
that cannot be written does not end the run before its last step: the next interval tries again.

With --colocate trainer and engines take turns on the same devices. The trainer takes them when it has its batch, and
trains and saves; they are the engines' again once a publication has all that it needs from the ranks.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from headrace.errors import Fenced, HeadraceError
from headrace.rpc.log import log
from services.trainer.plan.batch import Batch
from services.trainer.state import EngineIds, StaleEngines, TrainState


class TrainerLedger(Protocol):
    """The buffer, as the loop sees it."""

    async def rewind(self, step: int) -> int:
        """Brings back what was consumed from `step` on; returns the epoch that now owns the ledger."""

    async def lease_batch(self, epoch: int, step: int) -> Batch | None:
        """Waits a moment for the step's batch: the same one however often it is asked."""

    async def batch_ahead(self, epoch: int, step: int) -> Batch | None:
        """The batch of the step after the one leased, if it is full already."""

    async def consume(self, epoch: int, step: int, digest: bytes) -> None:
        """The optimizer has used the batch."""

    async def commit(self, epoch: int, step: int) -> None:
        """A checkpoint holds every step below `step`."""

    async def set_policy_version(self, epoch: int, policy_version: int) -> None:
        """The engines serve it."""


class Devices(Protocol):
    """The devices, which with --colocate are the engines' too; else taking and giving them does nothing."""

    is_shared: bool

    def claim(self, epoch: int) -> None:
        """The ledger epoch of this trainer."""

    async def take(self) -> None:
        """Engines give up their memory, weights and all, then the ranks' is on the devices."""

    async def give(self) -> None:
        """The ranks' memory moves to the host, then engines have theirs; they need weights."""


class Engines(Protocol):
    """Those that generate with the weights."""

    async def publish(self, state: TrainState) -> dict[str, float]:
        """The current weights to all of them, as one transaction; returns figures once they serve `state.step`."""

    async def stale_engines(self, state: TrainState) -> StaleEngines:
        """The engines, or the whole fleet, that started again and lack these weights."""

    async def rejoin(self, state: TrainState, engine_ids: EngineIds) -> None:
        """Engines that started again get the served weights, while the others go on."""


class Ranks(Protocol):
    """All trainer processes, as one."""

    @property
    def devices(self) -> Devices:
        """Theirs, or shared with the engines."""

    @property
    def engines(self) -> Engines:
        """Those of all rollout services."""

    async def restore(self) -> int:
        """Loads the latest checkpoint, if there is one; returns its step."""

    async def claim(self, state: TrainState) -> None:
        """Makes sure that only trainers of this epoch, or a newer one, put checkpoints into the folder from now on."""

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        """One rollout step's optimizer steps; returns their metrics."""

    async def prefetch(self, batch: Batch) -> None:
        """Every rank begins to fetch its samples of the next step, in the background."""

    async def publish(self, state: TrainState) -> dict[str, float]:
        """As the engines', which get shared devices before they load."""

    async def save(self, state: TrainState) -> None:
        """Takes a checkpoint, and shared devices for it; writing it may go on in the background.

        Raises what keeps it from being written.
        """

    async def flush(self) -> None:
        """Waits until what was taken is safe. Raises what kept it from that."""

    def take_safe(self) -> TrainState | None:
        """The newest state whose checkpoint became safe since this was asked last."""

    async def export(self) -> None:
        """Writes the Hugging Face folder the job asks for, if it asks."""


class Console(Protocol):
    """The person or program that watches and steers the run."""

    @property
    def stopping(self) -> bool:
        """True once the run is to end; also asked while a batch is awaited."""

    async def before_step(self, state: TrainState) -> bool:
        """Holds while paused, serves what was asked for; False ends the run."""

    async def evaluate(self, state: TrainState) -> None:
        """Starts an evaluation if one is due at this step; training goes on beside it unless the job says otherwise."""

    async def evaluated(self) -> None:
        """Returns when no evaluation runs."""

    def report(self, state: TrainState, metrics: dict[str, float]) -> None:
        """A step is done."""


class Schedule(Protocol):
    """The job's rhythm."""

    num_steps: int

    def publishes(self, state: TrainState) -> bool:
        """Returns True where the engines get new weights at this step."""

    def saves(self, state: TrainState) -> bool:
        """Returns True where a checkpoint is written at this step."""


async def train(ledger: TrainerLedger, ranks: Ranks, console: Console, schedule: Schedule) -> TrainState:
    """Runs the job to its end, or to where the console stops it."""
    step = await ranks.restore()
    state = TrainState(step, policy_version=step, epoch=await ledger.rewind(step))
    await ranks.claim(state)
    state, _ = await publish(ledger, ranks, state)
    covered = state
    await console.evaluate(state)

    while state.step < schedule.num_steps and await console.before_step(state):
        await ranks.devices.give()
        state, batch = await next_batch(ledger, ranks, console, state)
        if batch is None:
            break
        if state.step + 1 < schedule.num_steps:
            await look_ahead(ledger, ranks, state)
        await ranks.devices.take()
        metrics = await ranks.train(state.step, batch)
        await ledger.consume(state.epoch, state.step, batch.digest)
        state = state.trained()
        if ranks.devices.is_shared and schedule.saves(state):
            await save_or_warn(ranks.save(state))
        if schedule.publishes(state):
            state, figures = await publish(ledger, ranks, state)
            metrics |= figures
        if not ranks.devices.is_shared and schedule.saves(state):
            await save_or_warn(ranks.save(state))
        covered = await commit(ledger, ranks, covered)
        console.report(state, metrics)
        await console.evaluate(state)

    await save_or_warn(ranks.flush())
    covered = await commit(ledger, ranks, covered)
    if covered.step != state.step:
        await ranks.save(state)
        await ranks.flush()
        await commit(ledger, ranks, covered)
    await ranks.export()
    await console.evaluated()
    return state


async def save_or_warn(saving: Awaitable[None]) -> None:
    """Goes on without a checkpoint that cannot be written now: the next one may be. A newer trainer ends this one."""
    try:
        await saving
    except Fenced:
        raise
    except HeadraceError as error:
        log.warning("checkpoint_failed", reason=error.reason, error=error.message)


async def next_batch(
    ledger: TrainerLedger, ranks: Ranks, console: Console, state: TrainState
) -> tuple[TrainState, Batch | None]:
    """The step's batch, once it is full; None when the run is to end. Engines that start meanwhile get the weights."""
    while (batch := await ledger.lease_batch(state.epoch, state.step)) is None and not console.stopping:
        stale = await ranks.engines.stale_engines(state)
        if stale.all:
            state, _ = await publish(ledger, ranks, state)
        elif stale.engine_ids:
            await ranks.engines.rejoin(state, stale.engine_ids)
    return state, batch


async def look_ahead(ledger: TrainerLedger, ranks: Ranks, state: TrainState) -> None:
    """Prefetches the next batch, if it is full already: in asynchronous training it often is."""
    if (upcoming := await ledger.batch_ahead(state.epoch, state.step + 1)) is not None:
        await ranks.prefetch(upcoming)


async def commit(ledger: TrainerLedger, ranks: Ranks, covered: TrainState) -> TrainState:
    """Lets the ledger release the steps that a safe checkpoint covers; returns the state of the newest safe one."""
    if (safe := ranks.take_safe()) is None:
        return covered
    await ledger.commit(safe.epoch, safe.step)
    return safe


async def publish(ledger: TrainerLedger, ranks: Ranks, state: TrainState) -> tuple[TrainState, dict[str, float]]:
    """The current weights to the engines, then to the ledger's knowledge."""
    figures = await ranks.publish(state)
    state = state.published()
    await ledger.set_policy_version(state.epoch, state.policy_version)
    return state, figures
