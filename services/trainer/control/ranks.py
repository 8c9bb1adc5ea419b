"""All ranks as one: rank 0 orders, every rank carries out, one command at a time and in one order.

The event loop is the main thread's; whatever may wait for other ranks happens in the compute thread.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

import msgspec

from headrace.api.trainer.v1 import trainer_pb2 as pb
from headrace.errors import DeadlineExceeded, HeadraceError, Internal
from headrace.models.folders import is_whole
from headrace.rpc import tracing
from headrace.rpc.log import log
from headrace.rpc.tls import tls_of
from services.trainer.checkpoint.checkpoint import Checkpoints
from services.trainer.control.channel import Answer, Channel, Order
from services.trainer.control.worker import Command, RankWorker, commands
from services.trainer.data.buffer import TrainingRecord
from services.trainer.data.samples import SkippedSamples
from services.trainer.durable import retry_while_full
from services.trainer.loop import Devices, Engines
from services.trainer.megatron.parallel import Layout, told
from services.trainer.megatron.rendezvous import listener, on_one_machine, own_host
from services.trainer.plan.batch import Batch, statistics
from services.trainer.serving.console import TrainerConsole
from services.trainer.state import TrainState

P = ParamSpec("P")
R = TypeVar("R")


class Worker(Protocol):
    """What a rank runs: its other commands are marked as well."""

    def leave(self) -> None: ...


W = TypeVar("W", bound=Worker)

_FAIL_ALIKE = (RankWorker.save.__name__, RankWorker.export.__name__)
"""Commands whose HeadraceErrors are raised on all ranks: rank 0 has them too, and decides."""


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    layout: Layout
    channel: Channel


async def join(join_group: Callable[[], Layout], compute: ThreadPoolExecutor) -> JoinedRanks:
    """Joins the other ranks, in the compute thread, and watches over them from here on."""
    log.info("joining")
    layout = await asyncio.get_running_loop().run_in_executor(compute, join_group)
    channel = await open_channel(layout, compute)
    log.info("ranks_met", rank=layout.rank, world_size=layout.world_size)
    return JoinedRanks(layout, channel)


async def open_channel(layout: Layout, compute: ThreadPoolExecutor) -> Channel:
    """Called on all ranks at once, after torch.distributed is up; returns when all are connected."""
    rank, world_size = layout.rank, layout.world_size
    if world_size == 1:
        return Channel(rank, world_size, b"")

    async def tell(text: str) -> str:
        return (await asyncio.get_running_loop().run_in_executor(compute, told, text.encode(), layout)).decode()

    tls = None if on_one_machine() else tls_of()
    if rank == 0:
        host, secret = own_host(), secrets.token_bytes(32)
        channel = Channel(rank, world_size, secret, tls)
        port = await channel.listen(listener(host))
        await tell(f"{host} {port} {secret.hex()}")
        await channel.until_complete()
    else:
        host, its_port, its_secret = (await tell("")).split()
        channel = Channel(rank, world_size, bytes.fromhex(its_secret), tls)
        await channel.connect(host, int(its_port))
    return channel


class RankGroup(Generic[W]):
    """Lives on rank 0. The compute thread executes, so the event loop answers in the middle of a step.

    `ranks.call(RankWorker.prefetch, samples)`: the method's signature is the command's.
    """

    def __init__(self, channel: Channel, worker: W, compute: ThreadPoolExecutor, kind: type[W] | None = None) -> None:
        """`kind`: the class whose methods are the commands; None: RankWorker."""
        self._channel = channel
        self._worker = worker
        self._compute = compute
        self._commands = commands(kind or RankWorker)
        self._number = 0

    def call(self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
        """Rank 0's own result. The others start before it does, and only collectives inside keep them in step."""
        return self._order(False, method, args, kwargs)

    def ask(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[asyncio.Future[R]]:
        """The result of every rank, by rank."""
        own = self._order(True, method, args, kwargs)
        others: list[asyncio.Future[R]] = self._channel.expect(self._number, self._commands[method.__name__].result_of)
        return [own, *others]

    async def gather(
        self,
        deadline_seconds: float,
        method: Callable[Concatenate[W, P], R | None],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """The results of the ranks that have one, by rank.

        Raises the first error of a rank, or DeadlineExceeded when one does not answer in time.
        """
        return await results_of(self.ask(method, *args, **kwargs), method, deadline_seconds)

    def abort(self, publication_id: str) -> None:
        self._channel.abort(publication_id)

    def _order(
        self, wants_answer: bool, method: Callable[..., R], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> asyncio.Future[R]:
        self._number += 1
        number, name = self._number, method.__name__

        def work() -> R:  # arguments may be large: they are packed here
            self._channel.send(Order(number, name, self._commands[name].pack(args, kwargs), wants_answer))
            result: R = getattr(self._worker, name)(*args, **kwargs)
            return result

        return asyncio.get_running_loop().run_in_executor(self._compute, work)


async def results_of(
    answers: Sequence[asyncio.Future[R | None]], method: Callable[..., object], deadline_seconds: float
) -> list[R]:
    """As `RankGroup.gather`, of what was asked before."""
    done, late = await asyncio.wait(answers, timeout=deadline_seconds, return_when=asyncio.FIRST_EXCEPTION)
    for answer in done:
        answer.result()
    if late:
        raise DeadlineExceeded(
            f"{len(late)} ranks did not finish {method.__name__} within {deadline_seconds:g} s: see the trainer's logs "
            "for the rank that hangs"
        )
    return [result for answer in answers if (result := answer.result()) is not None]


async def follow(
    channel: Channel, worker: Worker, compute: ThreadPoolExecutor, kind: type[Worker] = RankWorker
) -> None:
    loop, order = asyncio.get_running_loop(), None
    while order is None or order.method != Worker.leave.__name__:
        order = await channel.next_order()
        await loop.run_in_executor(compute, _obey, channel, worker, commands(kind), order)


def _obey(channel: Channel, worker: Worker, known: Mapping[str, Command], order: Order) -> None:
    if (command := known.get(order.method)) is None:
        raise Internal(f"rank 0 asks for {order.method!r}, which no rank does: start all ranks with the same headrace")
    result = None
    try:
        result = getattr(worker, order.method)(*command.unpack(order.arguments))
    except HeadraceError as error:
        if order.method not in _FAIL_ALIKE:
            raise
        log.warning("files_failed", reason=error.reason, error=error.message)
    if order.wants_answer:
        channel.send(Answer(order.number, msgspec.Raw(msgspec.msgpack.encode(result))))


@dataclass(frozen=True, slots=True)
class TrainerRanks:
    """What the training loop asks of all ranks, put into commands and publications.

    `restored_step` is where the latest checkpoint left off, 0 without one; `save_hf` is the Hugging Face folder that
    the job wants after `num_steps`.
    """

    group: RankGroup[RankWorker]
    engines: Engines
    console: TrainerConsole
    record: TrainingRecord
    skipped: SkippedSamples
    checkpoints: Checkpoints
    _: KW_ONLY
    restored_step: int
    num_steps: int
    save_hf: Path | None
    devices: Devices

    async def restore(self) -> int:
        """The ranks restored themselves while they were built; this is the step they came to."""
        return self.restored_step

    async def claim(self, state: TrainState) -> None:
        self.devices.claim(state.epoch)
        await asyncio.to_thread(self.checkpoints.claim, state.epoch)

    async def train(self, step: int, batch: Batch) -> dict[str, float]:
        traces = tracing.samples((sample.group_id, sample.index) for sample in batch.samples)
        with self.console.phase(pb.PHASE_TRAINING), tracing.span("rl.train", traces, {tracing.STEP: step}):
            trained = await self.group.call(RankWorker.train, step, self.skipped.applied(batch).samples)
        await retry_while_full(lambda: self.skipped.append(step, trained.set_aside), self.skipped.path)
        await retry_while_full(lambda: self.record.append(step, batch), self.record.path)
        figures = statistics(self.skipped.applied(batch), step)
        if trained.is_logged:
            self.console.keep_from_trackers(figures)
        return trained.metrics | figures

    async def prefetch(self, batch: Batch) -> None:
        await self.group.call(RankWorker.prefetch, self.skipped.applied(batch).samples)

    async def publish(self, state: TrainState) -> dict[str, float]:
        with self.console.phase(pb.PHASE_PUBLISHING):
            return await self.engines.publish(state)

    async def flush(self) -> None:
        with self.console.phase(pb.PHASE_SAVING):
            await asyncio.to_thread(self.checkpoints.flush)

    def take_safe(self) -> TrainState | None:
        return self.checkpoints.take_safe()

    async def save(self, state: TrainState) -> None:
        """Returns when the checkpoint is safe, or with async_save when its copies are taken."""
        with self.console.phase(pb.PHASE_SAVING):
            await self.devices.take()  # a person may ask for it in the engines' turn
            await self.group.call(RankWorker.save, state.step, state.policy_version, state.epoch)

    def checkpoint_path(self, step: int) -> Path:
        return self.checkpoints.path_of(step)

    async def export(self) -> None:
        """Writes save_hf, if the job has it and a trainer that died at the very end has not written all of it yet."""
        if self.console.leaving:
            return
        folder = self.save_hf
        was_finished = self.restored_step == self.num_steps
        if folder is None or (was_finished and await asyncio.to_thread(is_whole, folder)):
            return
        await self.export_to(folder)

    async def export_to(self, path: Path) -> None:
        with self.console.phase(pb.PHASE_SAVING):
            await self.devices.take()
            await self.group.call(RankWorker.export, str(path))
