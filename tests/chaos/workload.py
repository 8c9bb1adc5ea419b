"""Four producers and two trainers that take over from each other, over one buffer that others do harm to.

A trainer is active until the next one rewinds to the last commit; then it is fenced, hears why, and waits for its turn.
Whatever the clients were told is written down, and held against the ledger at the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.digest import digest_of
from headrace.errors import FailedPrecondition, Fenced, InvalidArgument, NotFound
from headrace.ledger_tools.audit_run import audit_ledger, described, read_ledger
from services.trainer.data.buffer import TrainingRecord
from services.trainer.plan.batch import Batch
from tests.support.ledgers.buffer_samples import complete_put
from tests.support.processes.buffer_server import BufferProcess

NUM_PRODUCERS = 4
GROUPS_PER_STEP = 4
STEPS_PER_COMMIT = 3
DEADLINE_SECONDS = 600.0
"""A call may meet a kill at each of its tries, where a buffer that is killed at every step starts slowly."""
_WITH_PAYLOAD = (pb.GROUP_STATE_READY, pb.GROUP_STATE_CONSUMED)


@dataclass
class Told:
    """What the clients were told."""

    acknowledged: dict[str, bytes] = field(default_factory=dict)
    """Payloads."""
    num_read: int = 0
    """Payloads that were read back and are the same bit for bit."""
    prompts: dict[str, str] = field(default_factory=dict)
    batches: dict[int, list[str]] = field(default_factory=dict)
    checkpoint: int = 0
    """The newest step that a trainer has saved; also one that was fenced and did not know."""
    fenced: list[str] = field(default_factory=list)
    """What older trainers were told."""


@dataclass
class Workload:
    """Made by `working`."""

    buffer: BufferProcess
    record_file: Path
    told: Told = field(default_factory=Told)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    _stepped: asyncio.Event = field(default_factory=asyncio.Event)
    _next_trainer: asyncio.Event = field(default_factory=asyncio.Event)

    async def steps(self, count: int) -> None:
        """Waits until so many more steps are consumed."""
        for _ in range(count):
            self._stepped.clear()
            await self._stepped.wait()

    def hand_over(self) -> None:
        """The other trainer begins, while this one still believes in itself."""
        self._next_trainer.set()

    def stop(self) -> None:
        """Producers and trainers end after what they are at."""
        self._stopping.set()
        self._next_trainer.set()

    async def produce(self, name: str) -> None:
        """Leases and puts; retries are the client's."""
        async with self._client() as client:
            while not self._stopping.is_set():
                reply = await client.lease_groups("train", name, 2, wait_seconds=0.2)
                for lease in reply.leases:
                    prompt_id = lease.prompt.prompt_id
                    assert self.told.prompts.setdefault(lease.group_id, prompt_id) == prompt_id
                puts = [complete_put(lease) for lease in reply.leases]
                if not puts:
                    continue
                try:
                    results = await client.put_groups(puts)
                except InvalidArgument as error:
                    # The next trainer began below the version of the lease: nothing of that is trained any more.
                    if error.reason != "VERSION_NOT_SERVED":
                        raise
                    await client.release_leases([pb.LeaseRelease(lease_id=lease.lease_id) for lease in reply.leases])
                    continue
                for put, result in zip(puts, results, strict=True):
                    if not result.HasField("refused"):
                        self.told.acknowledged.update((s.envelope.sample_id, s.payload) for s in put.samples)

    async def train_in_turns(self) -> None:
        """One trainer after the other; the older is alive until it hears that it is fenced."""
        async with asyncio.TaskGroup() as trainers:
            while not self._stopping.is_set():
                self._next_trainer.clear()
                trainers.create_task(self._train())
                await self._next_trainer.wait()

    async def _train(self) -> None:
        record = TrainingRecord(self.record_file)
        async with self._client() as client:
            epoch, step = await self._begin(client)
            try:
                while not self._stopping.is_set():
                    step += await self._try_step(client, record, epoch, step)
            except Fenced as error:
                self.told.fenced.append(error.message)

    async def _try_step(self, client: BufferClient, record: TrainingRecord, epoch: int, step: int) -> int:
        reply = await client.try_lease_batch("train", epoch, step, wait_seconds=0.2)
        if not reply.ready:
            return 0
        group_ids = [group.group_id for group in reply.groups]
        assert self.told.batches.setdefault(step, group_ids) == group_ids
        batch = Batch.of(reply)
        ids = [sample.sample_id for sample in batch.samples]
        try:
            fetched = await client.fetch_samples("train", ids)
            assert len(fetched) == len(ids)
            self._check_bits(fetched)
        except NotFound:  # a newer trainer has committed them: the next call tells why
            return 0
        record.append(step, batch)
        await client.consume("train", epoch, step, reply.digest)
        await client.set_policy_version("train", epoch, step + 1)
        if (step + 1) % STEPS_PER_COMMIT == 0:
            self.told.checkpoint = max(self.told.checkpoint, step + 1)  # it is safe before the ledger hears of it
            await client.commit("train", epoch, step + 1)
        self._stepped.set()
        return 1

    async def _begin(self, client: BufferClient) -> tuple[int, int]:
        """(epoch, step) from the newest checkpoint; an older trainer may save another one meanwhile."""
        while True:
            step = self.told.checkpoint
            try:
                return (await client.rewind("train", step)).epoch, step
            except FailedPrecondition as error:
                if error.reason != "COMMITTED" or self.told.checkpoint == step:
                    raise

    async def check(self) -> None:
        """0 acknowledged lost, 0 consumed twice, every prompt walked once and in order."""
        found = await audit_ledger(self.buffer.address, "train", self.record_file, DEADLINE_SECONDS, deep=True)
        assert found.verdict.is_clean, described(found)
        async with self._client() as client:
            ledger = await read_ledger(client, "train", DEADLINE_SECONDS)
            held = {sample_id for group in ledger.replay.groups.values() for sample_id in group.sample_ids}
            assert self.told.acknowledged.keys() <= held | ledger.replay.given_up
            await self._check_payloads(client)
            used = {step: group_ids for step, group_ids in ledger.replay.steps.used.items() if group_ids}
            assert sorted(used) == list(range(len(used)))
            assert {len(group_ids) for group_ids in used.values()} == {GROUPS_PER_STEP}
            read = (await client.stats("train")).prompts_read
            walked = {f"train/{i}": f"prompts.jsonl:{i % 50 + 1}@{i // 50}" for i in range(read)}
            assert self.told.prompts.items() <= walked.items()

    async def _check_payloads(self, client: BufferClient) -> None:
        """What is READY or CONSUMED can be had, as it was put."""
        groups = (await client.list_groups("train", _WITH_PAYLOAD, page_size=1000)).groups
        ids = [sample.sample_id for group in groups for sample in group.samples]
        self._check_bits(await client.fetch_samples("train", ids))

    def _check_bits(self, samples: Sequence[sample_pb2.Sample]) -> None:
        for sample in samples:
            assert digest_of(sample.payload) == sample.envelope.digest
            acknowledged = self.told.acknowledged.get(sample.envelope.sample_id, sample.payload)
            assert acknowledged == sample.payload, sample.envelope.sample_id
            self.told.num_read += 1

    def _client(self) -> BufferClient:
        return BufferClient(self.buffer.address, deadline_seconds=DEADLINE_SECONDS)


@asynccontextmanager
async def working(buffer: BufferProcess, folder: Path) -> AsyncIterator[Workload]:
    """The workload runs while the block does; it is checked when the block has ended well."""
    workload = Workload(buffer, folder / "trained.jsonl")
    async with asyncio.TaskGroup() as tasks:
        for i in range(NUM_PRODUCERS):
            tasks.create_task(workload.produce(f"producer-{i}"))
        tasks.create_task(workload.train_in_turns())
        yield workload
        workload.stop()
    await workload.check()
