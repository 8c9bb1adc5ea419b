"""Orders and answers between ranks over real connections; what a rank does with an order is a fake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import msgspec
import pytest

from headrace.errors import DeadlineExceeded, FailedPrecondition, Internal
from services.trainer.control.channel import Channel, Order
from services.trainer.control.ranks import RankGroup, follow
from services.trainer.control.senders import Sent, StageGroup, part_of
from services.trainer.control.transport import SentByAll, send_weights
from services.trainer.control.worker import RankWorker, Trained
from services.trainer.megatron.rendezvous import listener
from services.trainer.plan.batch import SampleFacts
from tests.support.fakes.idle_worker import IdleWorker
from tests.support.ledgers.facts import facts


class Worker(IdleWorker):
    """One rank, which knows its number and its channel."""

    def __init__(self, rank: int, channel: Channel) -> None:
        self.rank = rank
        self.channel = channel


async def test_all_ranks_carry_out_the_same_commands_in_the_same_order() -> None:
    done: dict[int, list[tuple[object, ...]]] = {0: [], 1: [], 2: []}

    class Diarist(Worker):
        def prefetch(self, samples: Sequence[SampleFacts]) -> None:
            done[self.rank].append(("prefetch", *samples))

        def train(self, step: int, samples: Sequence[SampleFacts]) -> Trained:
            done[self.rank].append(("train", step, *samples))
            return Trained({"loss": 0.5}, ())

        def drop_groups(self, services: Sequence[int]) -> None:
            done[self.rank].append(("drop", *services))

        def save(self, step: int, policy_version: int, epoch: int) -> None:
            done[self.rank].append(("save", step, policy_version, epoch))

    samples = (facts("s0", reward=None), facts("s1 ✓", reward=0.1 + 0.2))
    async with ranks(3, Diarist) as group:
        await group.call(RankWorker.prefetch, samples)
        trained = await group.call(RankWorker.train, 7, samples)
        await group.call(RankWorker.drop_groups, [0, 2])
        await group.call(RankWorker.save, 7, policy_version=6, epoch=2)
        await group.gather(60.0, RankWorker.leave)
    assert trained == Trained({"loss": 0.5}, ())
    assert done[0] == [("prefetch", *samples), ("train", 7, *samples), ("drop", 0, 2), ("save", 7, 6, 2)]
    assert done[1] == done[2] == done[0]


@pytest.mark.parametrize("method", ["execute", "__init__", "_wait_for_samples"])
async def test_nothing_but_a_command_with_arguments_of_its_types_is_carried_out(method: str) -> None:
    with pytest.raises(Internal, match=f"rank 0 asks for '{method}'"):
        async with ranks(2, Worker) as group:
            group._channel.send(Order(1, method, msgspec.Raw(msgspec.msgpack.encode([])), False))
    with pytest.raises(msgspec.ValidationError, match="Expected `int`"):
        async with ranks(2, Worker) as group:
            group._channel.send(Order(1, "open_group", msgspec.Raw(msgspec.msgpack.encode(["one"])), False))


async def test_a_service_that_a_stage_could_not_send_to_is_left_with_the_stages_reason() -> None:
    class Leaving(Worker):
        def send_weights(self, publication_id: str, world_sizes: Mapping[int, int], kept: bool = False) -> Sent:
            if self.rank == 1:
                until(lambda: self.channel.is_aborted(part_of("p", 1)))
                assert not self.channel.is_aborted("p")
                return Sent(1, {"w1": "sum"}, left={1: "given up"})
            return Sent(0, {"w0": "sum"})

    async with ranks(2, Leaving) as group:
        sending = asyncio.create_task(send_weights(group, "p", {0: 2, 1: 3}, deadline_seconds=60.0))
        await asyncio.sleep(0)
        group.abort(part_of("p", 1))
        assert await sending == SentByAll({"w0": "sum", "w1": "sum"}, {1: "stage 1: given up"})
        await group.gather(60.0, RankWorker.leave)


async def test_a_rank_that_does_not_answer_is_not_waited_for_and_its_late_answer_is_nobodys() -> None:
    hanging = threading.Event()

    class Hanging(Worker):
        def open_group(self, service: int) -> StageGroup | None:
            if self.rank == 0:
                return None
            hanging.wait()
            return StageGroup(0, "late", "host", 1, False)

    async with ranks(2, Hanging) as group:
        with pytest.raises(DeadlineExceeded, match=r"1 ranks did not finish open_group within 0.05 s: .* that hangs"):
            await group.gather(0.05, RankWorker.open_group, 0)
        hanging.set()
        await group.gather(60.0, RankWorker.leave)


async def test_what_a_disk_refuses_on_all_ranks_alike_ends_none_of_them() -> None:
    class Full(Worker):
        def save(self, step: int, policy_version: int, epoch: int) -> None:
            raise FailedPrecondition("the disk refuses")

        def export(self, path: str) -> None:
            raise FailedPrecondition("the disk refuses")

    async with ranks(2, Full) as group:
        for files in (group.call(RankWorker.save, 1, 1, 1), group.call(RankWorker.export, "folder")):
            with pytest.raises(FailedPrecondition, match="the disk refuses"):
                await files
        await group.gather(60.0, RankWorker.leave)


def until(condition: Callable[[], bool]) -> None:
    """Waits in a compute thread."""
    while not condition():
        threading.Event().wait(0.001)


@asynccontextmanager
async def ranks(world_size: int, worker: Callable[[int, Channel], Worker]) -> AsyncIterator[RankGroup]:
    """Rank 0's group; the others follow, each over a connection of its own, until it leaves."""
    channels = [Channel(rank, world_size, b"secret") for rank in range(world_size)]
    port = await channels[0].listen(listener("127.0.0.1"))
    pools = [ThreadPoolExecutor(1) for _ in channels]
    for each in channels[1:]:
        await each.connect("127.0.0.1", port)
    await channels[0].until_complete()

    async def followed(rank: int) -> None:
        try:
            await channels[rank].guard(follow(channels[rank], worker(rank, channels[rank]), pools[rank]))
        finally:
            await channels[rank].close()

    following = [asyncio.create_task(followed(rank)) for rank in range(1, world_size)]
    try:
        yield RankGroup(channels[0], worker(0, channels[0]), pools[0])
        await asyncio.gather(*following)
    finally:
        await channels[0].close()
