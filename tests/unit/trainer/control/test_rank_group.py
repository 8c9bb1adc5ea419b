"""Orders and answers between ranks over real connections; what a rank does with an order is a fake."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.errors import DeadlineExceeded, FailedPrecondition, PublicationAborted
from services.trainer.control.channel import Channel
from services.trainer.control.messages import (
    Command,
    DropGroups,
    Export,
    Leave,
    OpenGroups,
    Prefetch,
    Result,
    Save,
    SendWeights,
    Sent,
    StageGroup,
    Train,
    Trained,
    part_of,
)
from services.trainer.control.rank_group import Execute, RankGroup, SentByAll, follow
from services.trainer.megatron.rendezvous import listener
from services.trainer.state import TrainState
from tests.support.ledgers.facts import facts

Work = Callable[[int, Channel, Command], Result | Trained]
"""(rank, its channel, command)"""


async def test_all_ranks_carry_out_the_same_commands_in_the_same_order() -> None:
    done: dict[int, list[Command]] = {0: [], 1: [], 2: []}

    def work(rank: int, channel: Channel, command: Command) -> Result | Trained:
        done[rank].append(command)
        return Trained({"loss": 0.5}, ()) if isinstance(command, Train) else None

    samples = (facts("s0", reward=None), facts("s1 ✓", reward=0.1 + 0.2))
    async with ranks(3, work) as group:
        await group.prefetch(samples)
        trained = await group.train(7, samples)
        await group.drop_groups()
        await group.save(TrainState(7, 6, 2))
        await group.leave(deadline_seconds=60.0)
    assert trained == Trained({"loss": 0.5}, ())
    assert done[0] == [Prefetch(samples), Train(7, samples), DropGroups(), Save(7, 6, 2), Leave()]
    assert done[1] == done[2] == done[0]


async def test_answers_are_those_of_ranks_that_have_one_by_stage() -> None:
    def work(rank: int, channel: Channel, command: Command) -> Result:
        return StageGroup(2 - rank, f"g{rank}", "host", rank, rank == 1) if rank and command == OpenGroups() else None

    async with ranks(3, work) as group:
        assert await group.open_groups(deadline_seconds=60.0) == [
            StageGroup(0, "g2", "host", 2, False),
            StageGroup(1, "g1", "host", 1, True),
        ]
        assert await group.describe_weights(deadline_seconds=60.0) == []
        await group.leave(deadline_seconds=60.0)


async def test_a_stage_that_fails_stops_the_others_at_once() -> None:
    def work(rank: int, channel: Channel, command: Command) -> Result:
        if not isinstance(command, SendWeights):
            return None
        if rank == 1:
            return Sent(1, {}, "no engine")
        until(lambda: channel.is_aborted(command.publication_id))
        return Sent(rank, {}, "the publication was given up")

    async with ranks(3, work) as group:
        with pytest.raises(PublicationAborted, match="stage 1: no engine"):
            await group.send_weights("p", {0: 2}, deadline_seconds=60.0)
        await group.leave(deadline_seconds=60.0)


async def test_a_service_that_a_stage_could_not_send_to_is_left_with_the_stages_reason() -> None:
    def work(rank: int, channel: Channel, command: Command) -> Result:
        if not isinstance(command, SendWeights):
            return None
        if rank == 1:
            until(lambda: channel.is_aborted(part_of("p", 1)))
            assert not channel.is_aborted("p")
            return Sent(1, {"w1": "sum"}, left={1: "given up"})
        return Sent(0, {"w0": "sum"})

    async with ranks(2, work) as group:
        sending = asyncio.create_task(group.send_weights("p", {0: 2, 1: 3}, deadline_seconds=60.0))
        await asyncio.sleep(0)
        group.abort("p", 1)
        assert await sending == SentByAll({"w0": "sum", "w1": "sum"}, {1: "stage 1: given up"})
        await group.leave(deadline_seconds=60.0)


async def test_a_publication_that_is_given_up_stops_the_senders_of_that_one_alone() -> None:
    def work(rank: int, channel: Channel, command: Command) -> Result:
        if not isinstance(command, SendWeights):
            return None
        if command.publication_id == "first":
            until(lambda: channel.is_aborted("first"))
            return Sent(rank, {}, "given up")
        assert not channel.is_aborted(command.publication_id)
        return Sent(rank, {f"w{rank}": "sum"})

    async with ranks(2, work) as group:
        sending = asyncio.create_task(group.send_weights("first", {0: 2}, deadline_seconds=60.0))
        await asyncio.sleep(0)
        group.abort("first")
        with pytest.raises(PublicationAborted, match="given up"):
            await sending
        sent = await group.send_weights("second", {0: 2}, deadline_seconds=60.0)
        assert sent == SentByAll({"w0": "sum", "w1": "sum"}, {})
        await group.leave(deadline_seconds=60.0)


async def test_a_rank_that_does_not_answer_is_not_waited_for_and_its_late_answer_is_nobodys() -> None:
    hanging = threading.Event()

    def work(rank: int, channel: Channel, command: Command) -> Result:
        if rank and command == OpenGroups():
            hanging.wait()
            return StageGroup(0, "late", "host", 1, False)
        return None

    async with ranks(2, work) as group:
        with pytest.raises(DeadlineExceeded, match=r"1 ranks gave no StageGroup within 0.05 s: .* the rank that hangs"):
            await group.open_groups(deadline_seconds=0.05)
        hanging.set()
        await group.leave(deadline_seconds=60.0)


async def test_a_rank_whose_files_are_never_written_does_not_keep_the_others_from_ending() -> None:
    hanging = threading.Event()

    def work(rank: int, channel: Channel, command: Command) -> Result:
        if rank == 1 and command == Leave():
            hanging.wait()
        return None

    async with ranks(3, work) as group:
        with pytest.raises(DeadlineExceeded, match=r"1 ranks did not finish writing their files within 0.05 s"):
            await asyncio.wait_for(group.leave(deadline_seconds=0.05), 60)
        hanging.set()


async def test_what_a_disk_refuses_on_all_ranks_alike_ends_none_of_them(tmp_path: Path) -> None:
    def work(rank: int, channel: Channel, command: Command) -> Result:
        if isinstance(command, Save | Export):
            raise FailedPrecondition("the disk refuses")
        return None

    async with ranks(2, work) as group:
        for files in (group.save(TrainState(1, 1, 1)), group.export(tmp_path)):
            with pytest.raises(FailedPrecondition, match="the disk refuses"):
                await files
        await group.leave(deadline_seconds=60.0)


async def test_any_other_error_ends_the_rank() -> None:
    def work(rank: int, channel: Channel, command: Command) -> Result:
        if rank == 1:
            raise FailedPrecondition("not of a file")
        return None

    with pytest.raises(FailedPrecondition, match="not of a file"):
        async with ranks(2, work) as group:
            await group.drop_groups()


async def test_memory_of_the_channel_does_not_grow_with_steps() -> None:
    samples = [facts(f"s{number}") for number in range(512)]
    async with ranks(3, lambda rank, channel, command: None) as group:

        async def steps(count: int) -> int:
            for _ in range(count):
                await group.prefetch(samples)
                await group.describe_weights(deadline_seconds=60.0)
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before = await steps(5)
            after = await steps(40)
        finally:
            tracemalloc.stop()
        await group.leave(deadline_seconds=60.0)
    assert after - before < 512 * 100, "less than one step's facts"


def until(condition: Callable[[], bool]) -> None:
    """Waits in a compute thread."""
    while not condition():
        threading.Event().wait(0.001)


@asynccontextmanager
async def ranks(world_size: int, work: Work) -> AsyncIterator[RankGroup]:
    """Rank 0's group; the others follow, each over a connection of its own, until it leaves."""
    channels = [Channel(rank, world_size, b"secret") for rank in range(world_size)]
    port = await channels[0].listen(listener("127.0.0.1"))
    pools = [ThreadPoolExecutor(1) for _ in channels]
    for each in channels[1:]:
        await each.connect("127.0.0.1", port)
    await channels[0].until_complete()

    def execute(rank: int) -> Execute:
        return lambda command: work(rank, channels[rank], command)

    async def followed(rank: int) -> None:
        try:
            await channels[rank].guard(follow(channels[rank], execute(rank), pools[rank]))
        finally:
            await channels[rank].close()

    following = [asyncio.create_task(followed(rank)) for rank in range(1, world_size)]
    try:
        yield RankGroup(channels[0], execute(0), pools[0])
        await asyncio.gather(*following)
    finally:
        await channels[0].close()
