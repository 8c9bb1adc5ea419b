"""All ranks as one: rank 0 orders, every rank carries out, one command at a time and in one order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from headrace.errors import DeadlineExceeded, HeadraceError, PublicationAborted
from headrace.rpc.log import log
from services.trainer.control.channel import Channel
from services.trainer.control.frames import Done, Order
from services.trainer.control.messages import (
    Command,
    DescribeWeights,
    DropGroups,
    Export,
    HashWeights,
    KeepWeights,
    Leave,
    OpenGroups,
    Prefetch,
    Probed,
    ProbeWeights,
    Result,
    Save,
    SendWeights,
    Sent,
    StageGroup,
    StageWeights,
    ToDevice,
    ToHost,
    Train,
    Trained,
    command_of,
    packed,
    part_of,
    result_of,
)
from services.trainer.plan.batch import SampleFacts
from services.trainer.state import TrainState

Execute = Callable[[Command], Result | Trained]
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class SentByAll:
    """The checksums that engines must have, and why a stage could not send everything to some services."""

    checksums: Mapping[str, str]
    left: Mapping[int, str]


class RankGroup:
    """Lives on rank 0. The compute thread executes, so the event loop answers in the middle of a step.

    A method returns once rank 0 is done, and collectives inside keep the others in step; one that has an answer of
    other ranks returns once they answered, or raises DeadlineExceeded `deadline_seconds` later.
    """

    def __init__(self, channel: Channel, execute: Execute, compute: ThreadPoolExecutor) -> None:
        self._channel = channel
        self._execute = execute
        self._compute = compute
        self._number = 0

    async def train(self, step: int, samples: Sequence[SampleFacts]) -> Trained:
        """All ranks train one rollout step; returns rank 0's metrics and the samples that were set aside."""
        trained = await self._order(Train(step, tuple(samples)))
        assert isinstance(trained, Trained)
        return trained

    async def prefetch(self, samples: Sequence[SampleFacts]) -> None:
        """Each rank begins to fetch its part of the next rollout step."""
        await self._order(Prefetch(tuple(samples)))

    async def describe_weights(self, *, deadline_seconds: float) -> list[StageWeights]:
        """The weights of every stage, by stage; the same throughout the run."""
        return sorted(
            await self._results(self._ask(DescribeWeights()), StageWeights, deadline_seconds),
            key=lambda found: found.stage,
        )

    async def open_groups(self, service: int = 0, *, deadline_seconds: float) -> list[StageGroup]:
        """The groups at which the stages' senders listen for a rollout service's engines, by stage."""
        return sorted(
            await self._results(self._ask(OpenGroups(service)), StageGroup, deadline_seconds),
            key=lambda found: found.stage,
        )

    async def probe(self, *, deadline_seconds: float) -> Probed:
        """The log-probs that engines must compute under the current weights."""
        (found,) = await self._results(self._ask(ProbeWeights()), Probed, deadline_seconds)
        return found

    async def hash_weights(self, *, deadline_seconds: float) -> dict[str, str]:
        """Returns what engines print over the current weights. Raises PublicationAborted when a stage cannot say."""
        return _checksums(await self._results(self._ask(HashWeights()), Sent, deadline_seconds))

    async def keep_weights(self) -> None:
        """The current weights are served: senders keep a copy, which `send_weights` may send later."""
        await self._order(KeepWeights())

    async def send_weights(
        self, publication_id: str, world_sizes: Mapping[int, int], *, kept: bool = False, deadline_seconds: float
    ) -> SentByAll:
        """The checksums that engines must hold, once every stage has sent what it has, or what it `kept`.

        `world_sizes` are of the groups of each rollout service. Raises PublicationAborted when a stage could send to
        none of them, or not in time: the first failure stops all.
        """

        def fail(why: str) -> None:
            errors.append(why)
            self.abort(publication_id)

        def hear(answer: asyncio.Future[Result | Trained]) -> None:
            if answer.cancelled() or answer.exception() is not None:
                return
            if isinstance(sent := answer.result(), Sent) and sent.error:
                fail(f"stage {sent.stage}: {sent.error}")

        errors: list[str] = []
        deadline = asyncio.get_running_loop().call_later(
            deadline_seconds, fail, f"weights were not sent within {deadline_seconds:g} s"
        )
        answers = self._ask(SendWeights(publication_id, dict(world_sizes), kept))
        for answer in answers:
            answer.add_done_callback(hear)
        try:
            sent = await self._results(answers, Sent, deadline_seconds)
        finally:
            deadline.cancel()
        if errors:
            raise PublicationAborted(errors[0])
        left = {service: f"stage {each.stage}: {why}" for each in sent for service, why in each.left.items()}
        return SentByAll(_checksums(sent), left)

    def abort(self, publication_id: str, service: int | None = None) -> None:
        """Senders that are at it stop, or go on without this rollout service."""
        self._channel.abort(publication_id if service is None else part_of(publication_id, service))

    async def drop_groups(self, services: Collection[int] = (0,)) -> None:
        """The next publication opens others for these rollout services."""
        await self._order(DropGroups(tuple(services)))

    async def to_host(self, *, deadline_seconds: float) -> None:
        """Returns when no rank has anything on its device any more."""
        await _all_answered(self._ask(ToHost()), "did not move their memory to the host", deadline_seconds)

    async def to_device(self, *, deadline_seconds: float) -> None:
        """Returns when all ranks have their memory back."""
        await _all_answered(self._ask(ToDevice()), "did not take their memory back", deadline_seconds)

    async def save(self, state: TrainState) -> None:
        """Writes a checkpoint. Raises a HeadraceError of any rank's files on all ranks alike."""
        await self._order(Save(state.step, state.policy_version, state.epoch))

    async def export(self, path: Path) -> None:
        """Writes a Hugging Face folder. Raises as `save` does."""
        await self._order(Export(str(path)))

    async def leave(self, *, deadline_seconds: float) -> None:
        """Lets the other ranks end; returns once the files of all ranks are written."""
        await _all_answered(self._ask(Leave()), "did not finish writing their files", deadline_seconds)

    def _order(self, command: Command) -> asyncio.Future[Result | Trained]:
        """Rank 0's own result; the others start before it does."""
        self._number += 1
        return asyncio.get_running_loop().run_in_executor(self._compute, self._work, self._number, command)

    def _work(self, number: int, command: Command) -> Result | Trained:
        self._channel.send(Order(number, packed(command)))
        return self._execute(command)

    def _ask(self, command: Command) -> list[asyncio.Future[Result | Trained]]:
        """Rank 0's own result and all others'."""
        own = self._order(command)
        others: list[asyncio.Future[Result | Trained]] = self._channel.expect(self._number, result_of)
        return [own, *others]

    async def _results(
        self, answers: list[asyncio.Future[Result | Trained]], kind: type[R], deadline_seconds: float
    ) -> list[R]:
        """Returns the results of this class; ranks that have nothing to say answer None."""
        await answers[0]
        await _all_answered(answers, f"gave no {kind.__name__}", deadline_seconds)
        return [result for answer in answers if isinstance(result := answer.result(), kind)]


async def _all_answered(
    answers: Sequence[asyncio.Future[Result | Trained]], failure: str, deadline_seconds: float
) -> None:
    """Raises the first error of a rank, or DeadlineExceeded when one does not answer in time."""
    done, late = await asyncio.wait(answers, timeout=deadline_seconds, return_when=asyncio.FIRST_EXCEPTION)
    for answer in done:
        answer.result()
    if late:
        raise DeadlineExceeded(
            f"{len(late)} ranks {failure} within {deadline_seconds:g} s: see the trainer's logs for the rank that hangs"
        )


async def follow(channel: Channel, execute: Execute, compute: ThreadPoolExecutor) -> None:
    """Follows rank 0's orders until it says Leave."""
    is_leaving = False
    while not is_leaving:
        found = await channel.next_order()
        is_leaving = await asyncio.get_running_loop().run_in_executor(compute, _obey, channel, execute, found)


def _obey(channel: Channel, execute: Execute, order: Order) -> bool:
    """True for the last order."""
    command, result = command_of(order.command), None
    try:
        result = execute(command)
    except HeadraceError as error:
        if not isinstance(command, Save | Export):
            raise
        log.warning("files_failed", reason=error.reason, error=error.message)  # rank 0 has it too and decides
    channel.send(Done(order.number, packed(None if isinstance(result, Trained) else result)))
    return isinstance(command, Leave)


def _checksums(sent: Sequence[Sent]) -> dict[str, str]:
    if failed := next((stage for stage in sent if stage.error), None):
        raise PublicationAborted(f"stage {failed.stage}: {failed.error}")
    return {name: checksum for stage in sent for name, checksum in stage.checksums.items()}
