"""Streams that are created, filled, deleted and created again under the same names, in a real buffer that is killed.

Every round makes random calls and kills the buffer with -9, mostly in the middle of the last call. Then it compares
what the new process loaded from its disk with what the calls were told. HEADRACE_STREAM_ROUNDS asks for more rounds.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from tests.hostile.servers.servers import ServerProcess, buffer_process, tracebacks
from tests.hostile.wire import BUFFER, Refused, Wire, sample

NUM_ROUNDS = int(os.environ.get("HEADRACE_STREAM_ROUNDS", "10"))
COMMANDS_PER_ROUND = 12
NAMES = ("s", "s/0", "train")
"""The second name begins with the first one; the last one is the job's own."""
FEW, MANY = (1, 7, 40), (1_500, 2_600)
"""Prompts of a submission. Deleting `MANY` groups takes several transactions."""
JOB: dict[str, object] = {
    "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 1},
    "buffer": {"lease_seconds": 3600},
}


@dataclass
class Lease:
    lease: pb.GroupLease
    is_live: bool = True


@dataclass
class Stream:
    """What the calls of one stream were told, from its creation until it is deleted."""

    name: str
    epoch: int
    groups: dict[str, str] = field(default_factory=dict)
    """Group id → state."""
    prompts: set[str] = field(default_factory=set)
    leases: list[Lease] = field(default_factory=list)
    stored: dict[str, sample_pb2.Sample] = field(default_factory=dict)


class Driver:
    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.streams: dict[str, Stream] = {}
        self.deleted: list[Stream] = []
        self._server = server
        self._chance = Random(seed)
        self._wire = Wire(server.address, BUFFER)
        self._numbers = 0
        self._kill_next = False

    async def close(self) -> None:
        await self._wire.close()

    async def begin(self) -> None:
        """The job's stream is there from the start."""
        await self._open("train")

    async def run_round(self) -> None:
        for number in range(COMMANDS_PER_ROUND):
            name = self._chance.choice(NAMES)
            self._kill_next = number == COMMANDS_PER_ROUND - 1
            if name not in self.streams:
                await self.create(name)
            else:
                commands = (self.submit, self.submit, self.lease, self.lease, self.put, self.release, self.delete)
                await self._chance.choice(commands)(self.streams[name])
        if self._kill_next:
            await self._restart()
        await self.compare()

    async def ask(self, name: str, request: Message) -> Any:
        """The answer. Where it is this call's turn, the buffer is killed in the middle of it, and it is repeated.

        Not where the call creates or deletes the job's own stream: the start does that again, before the repeated call.
        """
        is_of_the_job = isinstance(request, pb.DeleteStreamRequest) and request.stream == "train"
        is_of_the_job |= isinstance(request, pb.CreateStreamRequest) and request.config.name == "train"
        if not self._kill_next or is_of_the_job:
            return await self._wire.ask(name, request)
        self._kill_next = False
        first = asyncio.create_task(self._wire.ask(name, request))
        await asyncio.sleep(self._chance.uniform(0, 0.01))  # so that kills meet every part of the call
        await self._restart()
        try:
            await first
        except Refused as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise
        return await self._wire.ask(name, request)

    async def _restart(self) -> None:
        self._kill_next = False
        await self._server.kill()
        await self._server.start()
        if "train" not in self.streams:  # the job creates its own stream at each start
            await self._open("train")

    def _name(self, kind: str) -> str:
        self._numbers += 1
        return f"{kind}-{self._numbers}"

    # Commands

    async def create(self, name: str) -> None:
        config = pb.StreamConfig(name=name, n_samples_per_prompt=1, groups_per_step=2, lease_seconds=3600)
        await self.ask("CreateStream", pb.CreateStreamRequest(config=config))
        if name not in self.streams:
            await self._open(name)

    async def _open(self, name: str) -> None:
        request = pb.RewindRequest(stream=name, request_id=self._name("rewind"))
        self.streams[name] = Stream(name, (await self._wire.ask("Rewind", request)).epoch)

    async def submit(self, stream: Stream) -> None:
        count = self._chance.choice((*FEW, *FEW, *MANY))
        prompts = [sample_pb2.Prompt(prompt_id=f"{i}", text="?") for i in range(count)]
        answer = await self.ask("SubmitPrompts", pb.SubmitPromptsRequest(stream=stream.name, prompts=prompts))
        stream.groups |= {group_id: "QUEUED" for group_id in answer.group_ids if group_id not in stream.groups}
        stream.prompts.update(prompt.prompt_id for prompt in prompts)
        assert len(stream.groups) == len(stream.prompts), "a prompt of a deleted stream is known to the new one"

    async def lease(self, stream: Stream) -> None:
        count = self._chance.choice((1, 5, 900))
        request = pb.LeaseGroupsRequest(
            stream=stream.name, producer_id="p", request_id=self._name("lease"), max_groups=count
        )
        for lease in (await self.ask("LeaseGroups", request)).leases:
            assert stream.groups.get(lease.group_id) == "QUEUED", f"{lease.group_id} is of a deleted stream"
            stream.groups[lease.group_id] = "LEASED"
            stream.leases.append(Lease(lease))

    def _some(self, stream: Stream) -> list[Lease]:
        live = [lease for lease in stream.leases if lease.is_live]
        return self._chance.sample(live, min(len(live), self._chance.choice((1, 3, 30))))

    async def put(self, stream: Stream) -> None:
        some = self._some(stream)
        if not some:
            return
        puts = [_put(one.lease) for one in some]
        await self.ask("PutGroups", pb.PutGroupsRequest(groups=puts))
        for one, put in zip(some, puts, strict=True):
            one.is_live, stream.groups[put.group_id] = False, "READY"
            stream.stored |= {s.envelope.sample_id: s for s in put.samples}

    async def release(self, stream: Stream) -> None:
        some = self._some(stream)
        if some:
            releases = [pb.LeaseRelease(lease_id=one.lease.lease_id, reason="because") for one in some]
            await self.ask("ReleaseLeases", pb.ReleaseLeasesRequest(releases=releases))
        for one in some:
            one.is_live, stream.groups[one.lease.group_id] = False, "QUEUED"

    async def delete(self, stream: Stream) -> None:
        """Mostly another one of the name is created at once."""
        del self.streams[stream.name]
        self.deleted.append(stream)
        request = pb.DeleteStreamRequest(stream=stream.name, force=True)
        await self.ask("DeleteStream", request)
        if stream.name not in self.streams and self._chance.random() < 0.7:
            await self.create(stream.name)

    # What must hold

    async def compare(self) -> None:
        listed = (await self._wire.ask("ListStreams", pb.ListStreamsRequest())).streams
        assert sorted(config.name for config in listed) == sorted(self.streams)
        for stream in self.streams.values():
            assert await self._groups(stream.name) == stream.groups, f"{stream.name} has groups that are not its own"
            await self._compare_samples(stream)
        await self._compare_leases()
        for stream in self.deleted[-5:]:
            await self._is_gone(stream)

    async def _groups(self, name: str) -> dict[str, str]:
        found: dict[str, str] = {}
        token = ""
        while True:
            request = pb.ListGroupsRequest(stream=name, page_size=1_000, page_token=token)
            page = await self._wire.ask("ListGroups", request)
            found |= {g.group_id: pb.GroupState.Name(g.state).removeprefix("GROUP_STATE_") for g in page.groups}
            token = page.next_page_token
            if not token:
                return found

    async def _compare_samples(self, stream: Stream) -> None:
        if stream.stored:
            request = pb.FetchSamplesRequest(stream=stream.name, sample_ids=list(stream.stored))
            fetched = [s for reply in await self._wire.ask_all("FetchSamples", request) for s in reply.samples]
            assert {s.envelope.sample_id: s for s in fetched} == stream.stored

    async def _compare_leases(self) -> None:
        """Of all leases that were ever out only those of streams that are there can be renewed."""
        live = {one.lease.lease_id for s in self.streams.values() for one in s.leases if one.is_live}
        ever = [one.lease.lease_id for s in (*self.streams.values(), *self.deleted) for one in s.leases]
        for first in range(0, len(ever), 10_000):
            some = ever[first : first + 10_000]
            reply = await self._wire.ask("RenewLeases", pb.RenewLeasesRequest(lease_ids=some))
            assert set(reply.renewed) == live.intersection(some), "a lease of a deleted stream was renewed"

    async def _is_gone(self, stream: Stream) -> None:
        """Late calls of a deleted stream's producers and trainer change nothing; its samples are not there."""
        before = await self._groups(stream.name) if stream.name in self.streams else {}
        late = [one.lease for one in stream.leases if one.is_live][:20]
        if late:
            releases = [pb.LeaseRelease(lease_id=lease.lease_id) for lease in late]
            await self._wire.ask("ReleaseLeases", pb.ReleaseLeasesRequest(releases=releases))
        if stream.name not in self.streams:
            return
        if late:
            answer = await self._wire.ask("PutGroups", pb.PutGroupsRequest(groups=[_put(lease) for lease in late]))
            assert {result.refused.reason for result in answer.results} == {"LEASE_LOST"}
        with pytest.raises(Refused) as caught:
            await self._wire.ask("CommitStep", pb.CommitStepRequest(stream=stream.name, epoch=stream.epoch, step=0))
        assert caught.value.code is grpc.StatusCode.ABORTED, caught.value
        if stream.stored:
            request = pb.FetchSamplesRequest(stream=stream.name, sample_ids=list(stream.stored), skip_unknown=True)
            assert not [s for reply in await self._wire.ask_all("FetchSamples", request) for s in reply.samples]
        assert await self._groups(stream.name) == before


def _put(lease: pb.GroupLease) -> pb.GroupPut:
    one = sample(f"{lease.lease_id}/0", lease.group_id, 0, lease.policy_version)
    return pb.GroupPut(lease_id=lease.lease_id, group_id=lease.group_id, outcome=pb.PUT_OUTCOME_COMPLETE, samples=[one])


@asynccontextmanager
async def _driver(folder: Path, seed: int) -> AsyncIterator[Driver]:
    server = buffer_process(folder, JOB)
    await server.start()
    driver = Driver(server, seed)
    try:
        yield driver
    finally:
        await driver.close()
        await server.kill()
    assert not tracebacks(server.log), tracebacks(server.log)[0]


@pytest.mark.timeout(300 + NUM_ROUNDS * 30)
async def test_a_deleted_streams_groups_leases_and_trainer_never_reach_the_next_of_its_name(tmp_path: Path) -> None:
    async with _driver(tmp_path, 29) as driver:
        await driver.begin()
        for _ in range(NUM_ROUNDS):
            await driver.run_round()
        num_groups = sum(len(stream.groups) for stream in driver.deleted)
        print(f"\n{NUM_ROUNDS} kills, {len(driver.deleted)} streams deleted with {num_groups} groups")
        assert len(driver.deleted) >= NUM_ROUNDS // 2
