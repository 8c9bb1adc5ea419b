"""Random commands to a real buffer, killed with -9 between and within them, against the model in `ledger_reference`.

Every answer is compared; after every kill, and at the end, everything that can be read: groups, payloads byte for byte,
counts, and the history of every group. HEADRACE_LEDGER_COMMANDS and HEADRACE_LEDGER_SEEDS ask for more.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from tests.hostile.ledger_reference import COMMITTED, DROPPED, FAILED, LEASED, Group, No, Stream
from tests.hostile.servers.servers import ServerProcess, buffer_process, tracebacks
from tests.hostile.wire import BUFFER, Refused, Wire, payload, sample

NUM_COMMANDS = int(os.environ.get("HEADRACE_LEDGER_COMMANDS", "350"))
NUM_SEEDS = int(os.environ.get("HEADRACE_LEDGER_SEEDS", "1"))
COMMANDS_PER_KILL = 60
_LARGEST_TEXT = 60_000
_STREAM_SECONDS = 30.0
STREAMS = ("s", "s/0", "eval/s-0")
"""Names of which one begins with another, as do the ids of their groups."""


class Driver:
    """Sends a command to the server, repeats it when the server is killed meanwhile, and compares it with the model."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self._server = server
        self._chance = Random(seed)
        self._wire = Wire(server.address, BUFFER)
        self._numbers = 0
        self._kill_next = False
        self.num_kills = 0
        self.streams: dict[str, Stream] = {}

    async def close(self) -> None:
        await self._wire.close()

    async def create(self) -> None:
        for i, name in enumerate(STREAMS):
            stream = Stream(name, 2, 2, (1, 0, None)[i], max_attempts=2)
            config = pb.StreamConfig(
                name=name,
                n_samples_per_prompt=stream.n_samples,
                groups_per_step=stream.groups_per_step,
                max_staleness=stream.max_staleness,
                max_attempts=stream.max_attempts,
                lease_seconds=3600,
            )
            await self._wire.ask("CreateStream", pb.CreateStreamRequest(config=config))
            self.streams[name] = stream
            await self.rewind(stream)

    async def run(self, count: int) -> None:
        often = (self.submit, self.put, self.put, self.train, self.train)
        commands = (
            *often, *often, self.lease, self.lease, self.lease, self.put_again, self.put_other, self.drop, self.fail,
            self.put_other_reward, self.put_ahead,
            self.release, self.renew, self.retry, self.take_out, self.serve, self.serve, self.commit, self.rewind,
            self.old_epoch,
        )  # fmt: skip
        for number in range(1, count + 1):
            self._kill_next = number % COMMANDS_PER_KILL == 0
            await self._chance.choice(commands)(self._chance.choice(list(self.streams.values())))
            if self._kill_next:
                await self._kill()
            if number % COMMANDS_PER_KILL == 0:
                await self.compare()

    async def _ask(self, name: str, request: Message) -> tuple[Any, bool]:
        """(answer, whether it was asked before). Raises Refused."""
        if not self._kill_next or self._chance.random() < 0.3:
            return await self._wire.ask(name, request), False
        self._kill_next = False
        first = asyncio.create_task(self._wire.ask(name, request))
        await asyncio.sleep(self._chance.uniform(0, 0.004))
        await self._kill()
        try:
            await first
        except Refused as error:
            if error.code is not grpc.StatusCode.UNAVAILABLE:
                raise
        return await self._wire.ask(name, request), True

    async def _kill(self) -> None:
        self._kill_next = False
        self.num_kills += 1
        await self._server.kill()
        await self._server.start()

    def _name(self, kind: str) -> str:
        self._numbers += 1
        return f"{kind}-{self._numbers}"

    def _leased(self, stream: Stream) -> Group | None:
        leased = stream.of(LEASED)
        return self._chance.choice(leased) if leased else None

    def _samples(self, stream: Stream, group: Group) -> tuple[sample_pb2.Sample, ...]:
        version = self._chance.choice((stream.version, stream.version, max(stream.version - 1, 0)))
        made = []
        for i in range(stream.n_samples):
            text = self._chance.choice(("", "ok", "x" * self._chance.randrange(_LARGEST_TEXT)))
            body = payload([1, 2, 3, self._chance.randrange(300), i], 2, text=text)
            name = f"{group.lease_id}/{i}"
            made.append(sample(name, group.group_id, i, version, reward=self._chance.random(), body=body))
        return tuple(made)

    # Commands

    async def submit(self, stream: Stream) -> None:
        names = [self._name("p") for _ in range(self._chance.randrange(1, 6))]
        prompts = [sample_pb2.Prompt(prompt_id=name, text=f"What is {name}?", label="é") for name in names]
        if stream.groups and self._chance.random() < 0.3:
            prompts.append(self._chance.choice(list(stream.groups.values())).prompt)
        expected = stream.submit(prompts)
        reply, _ = await self._ask("SubmitPrompts", pb.SubmitPromptsRequest(stream=stream.name, prompts=prompts))
        for prompt, known, group_id in zip(prompts, expected, reply.group_ids, strict=True):
            assert known is None or known == group_id
            if known is None:
                stream.add(group_id, prompt)

    async def lease(self, stream: Stream) -> None:
        count = self._chance.randrange(1, 6)
        request = pb.LeaseGroupsRequest(
            stream=stream.name, producer_id="p", request_id=self._name("r"), max_groups=count
        )
        reply, _ = await self._ask("LeaseGroups", request)
        expected = stream.lease(count)
        assert [lease.group_id for lease in reply.leases] == [group.group_id for group in expected]
        for lease, group in zip(reply.leases, expected, strict=True):
            assert lease.prompt == group.prompt
            assert (lease.n_samples, lease.attempt) == (stream.n_samples, group.attempts)
            assert lease.policy_version == stream.version
            assert [s.SerializeToString() for s in lease.partial_samples] == [
                s.SerializeToString() for s in group.partials
            ]
            group.lease_id = lease.lease_id

    async def put(self, stream: Stream) -> None:
        group = self._leased(stream)
        if group:
            await self._put(stream, group, group.lease_id, self._samples(stream, group))

    async def put_again(self, stream: Stream) -> None:
        """The same put, whatever has become of its group."""
        put = [group for group in stream.groups.values() if group.samples]
        if put:
            group = self._chance.choice(put)
            lease_id = group.samples[0].envelope.sample_id.rpartition("/")[0]
            await self._put(stream, group, lease_id, group.samples)

    async def put_other(self, stream: Stream) -> None:
        """The same sample ids with other bytes, or a lease that never was."""
        put = [group for group in stream.groups.values() if group.samples and group.state != COMMITTED]
        if not put:
            return
        group = self._chance.choice(put)
        lease_id = group.samples[0].envelope.sample_id.rpartition("/")[0]
        body = payload([9, 9, 9, 9, 9], 2, text=self._name("other"))
        names = [s.envelope.sample_id for s in group.samples]
        others = tuple(sample(name, group.group_id, i, 0, body=body) for i, name in enumerate(names))
        await self._put(stream, group, lease_id, others)

    async def put_other_reward(self, stream: Stream) -> None:
        """The same samples and bytes, and one with another reward."""
        put = [group for group in stream.groups.values() if group.samples and group.state != COMMITTED]
        if put:
            group = self._chance.choice(put)
            first, *others = group.samples
            changed = sample_pb2.Sample.FromString(first.SerializeToString())
            changed.envelope.reward += 1
            await self._put(stream, group, first.envelope.sample_id.rpartition("/")[0], (changed, *others))

    async def put_ahead(self, stream: Stream) -> None:
        """Tokens of a policy version that is not served yet."""
        group = self._leased(stream)
        if group:
            body = payload([1, 2, 3, 4, 5], 2)
            ahead = stream.version + self._chance.choice((1, 1_000_000))
            versions = [stream.version] * (stream.n_samples - 1) + [ahead]
            samples = [
                sample(f"{group.lease_id}/{i}", group.group_id, i, version, body=body)
                for i, version in enumerate(versions)
            ]
            await self._put(stream, group, group.lease_id, tuple(samples))

    async def _put(self, stream: Stream, group: Group, lease_id: str, samples: tuple[sample_pb2.Sample, ...]) -> None:
        one = pb.GroupPut(lease_id=lease_id, group_id=group.group_id, outcome=pb.PUT_OUTCOME_COMPLETE, samples=samples)
        await self._compare_put(one, lambda: stream.put(group, lease_id, samples))

    async def _compare_put(self, one: pb.GroupPut, model: Any) -> None:
        request = pb.PutGroupsRequest(groups=[one])
        try:
            state, duplicate, refused = model()
        except No as no:
            await self._is_refused("PutGroups", request, no.code)
            return
        reply, repeated = await self._ask("PutGroups", request)
        (result,) = reply.results
        assert pb.GroupState.Name(result.state) == f"GROUP_STATE_{state}"
        assert result.HasField("refused") == refused
        assert result.duplicate == duplicate or (repeated and result.duplicate)

    async def drop(self, stream: Stream) -> None:
        await self._end(stream, DROPPED, pb.PUT_OUTCOME_DROPPED)

    async def fail(self, stream: Stream) -> None:
        await self._end(stream, FAILED, pb.PUT_OUTCOME_FAILED)

    async def _end(self, stream: Stream, outcome: str, number: pb.PutOutcome.ValueType) -> None:
        group = self._leased(stream)
        if group:
            failure = sample_pb2.Failure(reason="ON_PURPOSE", message="by the driver")
            one = pb.GroupPut(lease_id=group.lease_id, group_id=group.group_id, outcome=number, failure=failure)
            await self._compare_put(one, lambda: (stream.end(group, outcome, "ON_PURPOSE"), False, False))

    async def release(self, stream: Stream) -> None:
        group = self._leased(stream)
        if group is None:
            return
        partials: tuple[sample_pb2.Sample, ...] = ()
        if self._chance.random() < 0.5:
            partials = self._samples(stream, group)[:1]
            partials[0].envelope.status = sample_pb2.SAMPLE_STATUS_ABORTED
            partials[0].envelope.ClearField("reward")
        release = pb.LeaseRelease(lease_id=group.lease_id, partial_samples=partials, reason="because")
        await self._ask("ReleaseLeases", pb.ReleaseLeasesRequest(releases=[release]))
        stream.release(group, partials)

    async def renew(self, stream: Stream) -> None:
        live = [group.lease_id for group in stream.of(LEASED)]
        reply, _ = await self._ask("RenewLeases", pb.RenewLeasesRequest(lease_ids=[*live, "s/0#9.none"]))
        assert (list(reply.renewed), list(reply.lost)) == (live, ["s/0#9.none"])

    async def retry(self, stream: Stream) -> None:
        request = pb.RetryGroupsRequest(stream=stream.name, request_id=self._name("retry"))
        reply, _ = await self._ask("RetryGroups", request)
        assert (reply.num_groups, reply.num_failed) == (stream.retry(), 0)

    async def take_out(self, stream: Stream) -> None:
        """By an operator's word: one or two groups of any state."""
        if not stream.groups or self._chance.random() < 0.5:
            return
        groups = self._chance.sample(
            list(stream.groups.values()), k=min(len(stream.groups), self._chance.choice((1, 2)))
        )
        request = pb.DropGroupsRequest(stream=stream.name, request_id=self._name("drop"), reason="poison")
        request.group_ids.extend(group.group_id for group in groups)
        try:
            expected = stream.take_out(groups)
        except No as no:
            await self._is_refused("DropGroups", request, no.code)
            return
        reply, _ = await self._ask("DropGroups", request)
        assert (reply.num_groups, reply.num_batches) == expected

    async def train(self, stream: Stream) -> None:
        """A batch, its samples as they were put, and (mostly) the step."""
        step = stream.step + (self._chance.random() < 0.2)
        request = pb.LeaseBatchRequest(stream=stream.name, epoch=stream.epoch, step=step)
        try:
            groups = stream.batch(stream.epoch, step)
        except No as no:
            await self._is_refused("LeaseBatch", request, no.code)
            return
        reply, _ = await self._ask("LeaseBatch", request)
        assert reply.ready == (groups is not None)
        if groups is None:
            return
        assert [group.group_id for group in reply.groups] == [group.group_id for group in groups]
        for given, group in zip(reply.groups, groups, strict=True):
            assert list(given.samples) == [s.envelope for s in group.samples]
        if step == stream.step and self._chance.random() < 0.8:
            wanted = pb.ConsumeBatchRequest(stream=stream.name, epoch=stream.epoch, step=step, digest=reply.digest)
            answer, _ = await self._ask("ConsumeBatch", wanted)
            assert answer.next_step == stream.consume(stream.epoch, step)

    async def serve(self, stream: Stream) -> None:
        version = self._chance.choice((stream.step, stream.step, max(stream.step - 1, 0)))
        request = pb.SetPolicyVersionRequest(stream=stream.name, epoch=stream.epoch, policy_version=version)
        await self._compare("SetPolicyVersion", request, lambda: stream.serve(stream.epoch, version))

    async def commit(self, stream: Stream) -> None:
        step = self._chance.randrange(stream.committed, stream.step + 2)
        request = pb.CommitStepRequest(stream=stream.name, epoch=stream.epoch, step=step)
        reply = await self._compare("CommitStep", request, lambda: stream.commit(stream.epoch, step))
        if reply:
            (answer, repeated), count = reply
            assert answer.num_groups == count or (repeated and answer.num_groups == 0)

    async def rewind(self, stream: Stream) -> None:
        step = self._chance.choice((stream.step, max(stream.step - 1, stream.committed), stream.committed))
        request = pb.RewindRequest(stream=stream.name, step=step, request_id=self._name("w"))
        reply, _ = await self._ask("Rewind", request)
        assert (reply.epoch, reply.num_groups) == stream.rewind(step)
        await self.serve_exactly(stream, step)

    async def serve_exactly(self, stream: Stream, version: int) -> None:
        """As a trainer that has restored does before it asks for batches."""
        request = pb.SetPolicyVersionRequest(stream=stream.name, epoch=stream.epoch, policy_version=version)
        await self._compare("SetPolicyVersion", request, lambda: stream.serve(stream.epoch, version))

    async def old_epoch(self, stream: Stream) -> None:
        """A trainer that was fenced is told so, whatever it asks."""
        epoch = stream.epoch + self._chance.choice((-1, 1))
        request = self._chance.choice(
            (
                pb.LeaseBatchRequest(stream=stream.name, epoch=epoch, step=stream.step),
                pb.CommitStepRequest(stream=stream.name, epoch=epoch, step=stream.step),
                pb.SetPolicyVersionRequest(stream=stream.name, epoch=epoch, policy_version=stream.step),
            )
        )
        name = type(request).__name__.removesuffix("Request")
        await self._compare(name, request, lambda: stream.commit(epoch, stream.step))

    async def _compare(self, name: str, request: Message, model: Any) -> Any:
        """((answer, repeated), the model's), or None where both refuse."""
        try:
            expected = model()
        except No as no:
            await self._is_refused(name, request, no.code)
            return None
        return await self._ask(name, request), expected

    async def _is_refused(self, name: str, request: Message, code: grpc.StatusCode) -> None:
        with pytest.raises(Refused) as caught:
            await self._ask(name, request)
        assert caught.value.code is code, caught.value

    # Everything that can be read

    async def compare(self) -> None:
        stats = {s.stream: s for s in (await self._wire.ask("GetStats", pb.GetStatsRequest())).streams}
        for name, stream in self.streams.items():
            counted = stats[name]
            assert dict(counted.groups) == stream.counts()
            assert (counted.epoch, counted.step, counted.committed_step, counted.policy_version) == (
                stream.epoch, stream.step, stream.committed, stream.version,
            )  # fmt: skip
            await self._compare_groups(stream)
            await self._compare_payloads(stream)
        await self._compare_history()

    async def _compare_groups(self, stream: Stream) -> None:
        listed: dict[str, pb.Group] = {}
        token = ""
        while True:
            request = pb.ListGroupsRequest(stream=stream.name, page_size=7, page_token=token)
            page = await self._wire.ask("ListGroups", request)
            listed |= {group.group_id: group for group in page.groups}
            token = page.next_page_token
            if not token:
                break
        assert listed.keys() == stream.groups.keys()
        for group_id, group in stream.groups.items():
            given = listed[group_id]
            assert pb.GroupState.Name(given.state) == f"GROUP_STATE_{group.state}", group_id
            assert given.prompt == group.prompt
            assert list(given.samples) == [s.envelope for s in group.samples]
            assert (given.attempts, given.failure.reason) == (group.attempts, group.reason)
            assert given.step == group.step if given.HasField("step") else group.step is None

    async def _compare_payloads(self, stream: Stream) -> None:
        held = stream.payloads()
        if held:
            request = pb.FetchSamplesRequest(stream=stream.name, sample_ids=list(held))
            fetched = [s for reply in await self._wire.ask_all("FetchSamples", request) for s in reply.samples]
            assert [s.envelope.sample_id for s in fetched] == list(held)
            for given in fetched:
                assert given == held[given.envelope.sample_id]
        for group in stream.of(COMMITTED)[:3]:
            request = pb.FetchSamplesRequest(
                stream=stream.name, sample_ids=[s.envelope.sample_id for s in group.samples]
            )
            with pytest.raises(Refused) as caught:
                await self._wire.ask_all("FetchSamples", request)
            assert caught.value.code is grpc.StatusCode.NOT_FOUND

    async def _compare_history(self) -> None:
        end = (await self._wire.ask("GetStats", pb.GetStatsRequest())).position
        told: defaultdict[str, list[str]] = defaultdict(list)
        position, method = 0, BUFFER.methods_by_name["Watch"]
        while position < end:
            request = pb.WatchRequest(from_position=position + 1).SerializeToString()
            reply = await self._wire.send(method, request, seconds=_STREAM_SECONDS, most_messages=1)
            assert reply.messages, reply
            for event in (event for message in reply.messages for event in message.events):
                assert event.position == position + 1
                position = event.position
                if event.group_id:
                    told[event.group_id].append(event.kind)
        expected = {g.group_id: g.told for stream in self.streams.values() for g in stream.groups.values()}
        assert dict(told) == expected


@asynccontextmanager
async def _driver(folder: Path, seed: int) -> AsyncIterator[Driver]:
    server = buffer_process(folder, {"rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2}})
    await server.start()
    driver = Driver(server, seed)
    try:
        yield driver
    finally:
        await driver.close()
        await server.kill()
    assert not tracebacks(server.log)


@pytest.mark.timeout(300 + NUM_COMMANDS * 2)
@pytest.mark.parametrize("seed", range(1, NUM_SEEDS + 1))
async def test_a_ledger_that_is_killed_answers_and_shows_what_the_model_does(tmp_path: Path, seed: int) -> None:
    async with _driver(tmp_path, seed) as driver:
        await driver.create()
        await driver.run(NUM_COMMANDS)
        await driver.compare()
        print(f"\nseed {seed}: {NUM_COMMANDS} commands, {driver.num_kills} kills")
        told = Counter(word for s in driver.streams.values() for g in s.groups.values() for word in g.told)
        print(dict(told))
        assert told.keys() >= {"put", "batched", "consumed", "committed", "released", "failed", "dropped", "rewound"}
