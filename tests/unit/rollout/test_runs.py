"""Several runs on one rollout service and fake engines: each is served its adapters and fills its own ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.client.rollout import RolloutClient
from headrace.errors import AlreadyExists, FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from headrace.job.schema.job import Job
from headrace.models.folders import base_digest
from headrace.rpc.server import RpcServer
from headrace.run_folder import RunFolder
from services.buffer.store.memory import MemoryStore
from services.rollout.build import rollout_service
from services.rollout.engine.fleet import EngineState
from services.rollout.server import RolloutServicer, WaitUntilStarted
from services.rollout.service import LEASE_SECONDS, RolloutService
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE, served_rollout, without_router
from tests.support.fakes.scripted_reward import score, scripted_reward
from tests.support.models.tiny_model import make_tiny_qwen3, make_tiny_tokenizer
from tests.support.processes.buffer_server import served_buffer
from tests.unit.rollout.publication.test_adapters import write_adapter

NUM_GROUPS, NUM_SAMPLES = 4, 2


@dataclass
class Run:
    """A run with a ledger of its own, and what its trainer does."""

    job: Job
    buffer: BufferClient
    rollout: RolloutClient
    epoch: int = 0

    @property
    def name(self) -> str:
        return self.job.run.run_name

    async def join(self, **changes: Any) -> float:
        job = self.job.model_copy(update=changes) if changes else self.job
        digest = base_digest(job.model.hf_checkpoint)
        return await self.rollout.join_run(job.model_dump_json(), digest, deadline_seconds=30)

    async def publish(self, version: int) -> str:
        """The publication's id; the ledger knows the version then."""
        plan, checksums = write_adapter(
            RunFolder.of(self.job).weights_of(self.job.publish), version, name=f"e1-v{version}-{version:08x}"
        )
        specs = [pb.TensorSpec(name="lora_A", shape=[8, 2], dtype="float32", bucket=0)]
        await self.rollout.begin_publish(
            pb.BeginPublishRequest(
                publication_id=plan.publication_id,
                policy_version=version,
                manifest=pb.Manifest(tensors=specs, total_bytes=64),
                transport=pb.TRANSPORT_ADAPTER,
                disk_path=str(plan.folder),
                deadline_seconds=60,
                epoch=1,
                backend="gloo",
            ),
            deadline_seconds=60,
        )
        await self.rollout.publish_bucket(plan.publication_id, 0, deadline_seconds=60)
        await self.rollout.commit_publish(plan.publication_id, checksums, deadline_seconds=60)
        self.epoch = self.epoch or (await self.buffer.rewind("train", 0)).epoch
        await self.buffer.set_policy_version("train", self.epoch, version)
        return plan.publication_id

    async def submit(self, start: int, count: int = NUM_GROUPS) -> None:
        prompts = [sample_pb2.Prompt(prompt_id=f"p{n}", text=f"say {n}") for n in range(start, start + count)]
        await self.buffer.submit_prompts("train", prompts)

    async def samples(self, count: int = NUM_GROUPS) -> list[Any]:
        """The groups that are ready, once they are so many."""
        async with asyncio.timeout(60):
            while (await self.buffer.stats("train")).groups["READY"] < count:
                await asyncio.sleep(0.01)
        return [group for group in (await self.buffer.list_groups("train")).groups if group.samples]


@dataclass
class Fleet:
    engines: list[FakeEngine]
    service: RolloutService
    registry: CollectorRegistry
    address: str
    ledgers: Mapping[str, RpcServer]
    runs: Mapping[str, Run] = field(default_factory=dict)

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    async def second_at_work(self) -> tuple[Run, Run]:
        """Both runs have published, and the second has leased a group."""
        first, second = self.runs["first"], self.runs["second"]
        await first.publish(1)
        await second.join()
        await second.publish(1)
        await second.submit(0)
        async with asyncio.timeout(60):
            while not (await second.buffer.stats("train")).groups["LEASED"]:
                await asyncio.sleep(0.01)
        return first, second

    async def until_gone(self, run: Run) -> None:
        async with asyncio.timeout(60):
            while run.name in [each.name for each in (await self.runs["first"].rollout.get_fleet()).runs]:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def fleet(folder: Path, *, token_seconds: float = 0.0, **services: Any) -> AsyncIterator[Fleet]:
    checkpoint = make_tiny_qwen3(folder / "model")
    make_tiny_tokenizer().save_pretrained(checkpoint)

    def sections(name: str, buffer: str, reward: str) -> dict[str, Any]:
        return {
            "run": {"run_name": name, "run_dir": folder},
            "model": {"hf_checkpoint": checkpoint},
            "lora": {"lora_rank": 4},
            "publish": {"update_weight_transport": "adapter"},
            "data": {"apply_chat_template": False},
            "rollout": {
                "rollout_batch_size": NUM_GROUPS,
                "n_samples_per_prompt": NUM_SAMPLES,
                "rollout_max_response_len": 8,
            },
            "buffer": {"max_staleness": 8},
            "services": {"buffer_address": buffer, "reward_address": reward, "rollout_runs": 2, **services},
        }

    async with AsyncExitStack() as stack:
        jobs, buffers, ledgers = {}, {}, {}
        for number, name in enumerate(("first", "second", "third")):
            _, server = await stack.enter_async_context(served_buffer(MemoryStore()))
            ledgers[name] = server
            buffers[name] = await stack.enter_async_context(BufferClient(server.address))
            reward = await stack.enter_async_context(scripted_reward(score(float(number))))
            jobs[name] = Job.model_validate(sections(name, server.address, reward.address))
            config = buffer_pb2.StreamConfig(
                name="train", n_samples_per_prompt=NUM_SAMPLES, groups_per_step=NUM_GROUPS, max_staleness=8
            )
            await buffers[name].create_stream(config)
        engines, registry = [FakeEngine(WIRE, token_seconds=token_seconds)], CollectorRegistry()
        port = int(engines[0].url.rpartition(":")[2])

        def engine(number: int) -> FakeEngine:
            if engines[0].exit_code is not None:
                engines.append(FakeEngine(WIRE, token_seconds=token_seconds, port=port))
            return engines[-1]

        with without_router(engines[0]):
            service = rollout_service(jobs["first"], engine, folder, registry)
        await service.start()
        stack.push_async_callback(service.stop)
        servicer: Any = WaitUntilStarted(RolloutServicer(service.parts), service.started)
        address = await stack.enter_async_context(served_rollout(servicer))
        found = {
            name: Run(job, buffers[name], await stack.enter_async_context(RolloutClient(address, run=name)))
            for name, job in jobs.items()
        }
        yield Fleet(engines, service, registry, address, ledgers, found)


def versions(groups: list[Any]) -> set[int]:
    return {r.policy_version for group in groups for sample in group.samples for r in sample.policy_ranges}


async def test_each_run_is_served_its_own_versions_and_fills_its_own_ledger(tmp_path: Path) -> None:
    async with fleet(tmp_path) as shared:
        first, second = shared.runs["first"], shared.runs["second"]
        assert await first.join() == 0, "it is its own service"
        assert await second.join() == LEASE_SECONDS
        for _ in range(2):
            await second.join()
        names = [await first.publish(3), f"second.{await second.publish(7)}"]
        for run in (first, second):
            await run.submit(0)
        mine, theirs = await first.samples(), await second.samples()
        assert (versions(mine), versions(theirs)) == ({3}, {7})
        rewards = [{s.reward for g in groups for s in g.samples} for groups in (mine, theirs)]
        assert rewards == [{0.0}, {1.0}], "each is scored by its own service"
        assert sorted(shared.engine.adapters) == sorted(names)
        assert {body.get("lora_path") for body in shared.engine.bodies} == set(names)
        for run, version in ((first, 3), (second, 7)):
            reply = await run.rollout.get_fleet()
            assert (reply.policy_version, reply.groups_produced) == (version, NUM_GROUPS)


async def test_a_run_that_cannot_share_the_engines_is_refused_with_both_sides(tmp_path: Path) -> None:
    async with fleet(tmp_path) as shared:
        second, job = shared.runs["second"], shared.runs["second"].job
        for changes, names in (
            ({"publish": job.publish.model_copy(update={"update_weight_transport": "disk"})}, ("disk", "adapter")),
            ({"lora": job.lora.model_copy(update={"lora_rank": 8})}, ("8", "4")),
            ({"rollout": job.rollout.model_copy(update={"agent_hosts": True})}, ("agent_hosts",)),
        ):
            with pytest.raises(FailedPrecondition) as refused:
                await second.join(**changes)
            assert all(name in refused.value.message for name in names)
        with pytest.raises(FailedPrecondition, match="other base"):
            await second.rollout.join_run(job.model_dump_json(), "0" * 64, deadline_seconds=30)
        with pytest.raises(InvalidArgument):
            await second.rollout.join_run("{}", "0" * 64, deadline_seconds=30)
        with pytest.raises(AlreadyExists):
            await second.join(run=shared.runs["first"].job.run)
        with pytest.raises(Unavailable, match="has not joined"):
            await second.rollout.get_fleet(deadline_seconds=0.5)
        assert await second.join()
        with pytest.raises(ResourceExhausted, match="first, second"):
            await shared.runs["third"].join()
        await second.rollout.leave_run(deadline_seconds=30)
        assert await shared.runs["third"].join()


async def test_a_service_for_one_run_takes_no_other(tmp_path: Path) -> None:
    async with fleet(tmp_path, rollout_runs=1) as shared:
        with pytest.raises(FailedPrecondition, match="--rollout-runs"):
            await shared.runs["second"].join()
        assert not (await shared.runs["first"].rollout.get_fleet()).runs


async def test_nothing_is_left_of_a_run_whose_trainer_is_not_heard_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, token_seconds=0.02) as shared:
        first, second = await shared.second_at_work()
        assert b'run="second"' in generate_latest(shared.registry)
        monkeypatch.setattr("services.rollout.service.LEASE_SECONDS", 0.0)
        await shared.until_gone(second)
        async with asyncio.timeout(60):
            while [*shared.engine.adapters] != ["e1-v1-00000001"] or second.name in shared.service.parts.fleet.joined:
                await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            while b'run="second"' in generate_latest(shared.registry):
                await asyncio.sleep(0.01)
        stats = await second.buffer.stats("train")
        assert not stats.groups["LEASED"], "its leases were given back"
        await first.submit(0)
        assert versions(await first.samples()) == {1}


async def test_a_run_whose_ledger_died_with_it_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, token_seconds=0.02) as shared:
        _, second = await shared.second_at_work()
        await shared.ledgers["second"].stop()
        monkeypatch.setattr("services.rollout.service.LEASE_SECONDS", 0.0)
        await shared.until_gone(second)
        async with asyncio.timeout(30):
            while [*shared.engine.adapters] != ["e1-v1-00000001"] or second.name in shared.service.parts.fleet.joined:
                await asyncio.sleep(0.01)


async def test_a_publication_that_a_dead_trainer_left_open_holds_up_no_other_run(tmp_path: Path) -> None:
    async with fleet(tmp_path) as shared:
        first, second = shared.runs["first"], shared.runs["second"]
        await second.join()
        folder = RunFolder.of(second.job).weights_of(second.job.publish)
        plan, _ = write_adapter(folder, 1)
        request = pb.BeginPublishRequest(
            publication_id=plan.publication_id,
            policy_version=1,
            manifest=pb.Manifest(tensors=[pb.TensorSpec(name="lora_A", shape=[8, 2], dtype="float32", bucket=0)]),
            transport=pb.TRANSPORT_ADAPTER,
            disk_path=str(plan.folder),
            deadline_seconds=60,
            epoch=1,
            backend="gloo",
        )
        await second.rollout.begin_publish(request, deadline_seconds=60)
        await second.rollout.publish_bucket(plan.publication_id, 0, deadline_seconds=60)
        name = await first.publish(1)
        await second.rollout.leave_run(deadline_seconds=30)
        assert [*shared.engine.adapters] == [name]
        with pytest.raises(Unavailable):
            await second.rollout.begin_publish(request, deadline_seconds=0.5)


async def test_an_engine_that_restarts_has_the_adapters_of_all_runs(tmp_path: Path) -> None:
    async with fleet(tmp_path) as shared:
        first, second = shared.runs["first"], shared.runs["second"]
        await second.join()
        names = {await first.publish(1), f"second.{await second.publish(2)}"}
        before, engine = shared.engines[-1], shared.service.parts.fleet.engines[0]
        before.die()
        async with asyncio.timeout(60):
            while not engine.restarts or engine.state is not EngineState.READY:
                await asyncio.sleep(0.01)
        assert shared.engines[-1] is not before
        assert set(shared.engines[-1].adapters) == names


async def test_a_run_has_its_share_of_the_slots_at_once_though_another_borrowed_them(tmp_path: Path) -> None:
    async with fleet(tmp_path) as shared:
        first, second = shared.runs["first"], shared.runs["second"]
        await second.join()
        engine, turns = shared.service.parts.fleet.engines[0], shared.service.parts.runs
        assert turns is not None

        async def until(run: Run, in_flight: int, waiting: int) -> pb.Run:
            async with asyncio.timeout(60):
                while True:
                    seen = {each.name: each for each in turns.to_protos(shared.service.parts)}[run.name]
                    if (seen.in_flight, seen.waiting) == (in_flight, waiting):
                        return seen
                    await asyncio.sleep(0.01)

        for run in (first, second):
            await run.publish(1)
        await engine.client.pause("in_place")
        own = NUM_GROUPS * NUM_SAMPLES
        await first.submit(0, 16)
        await until(first, 2 * own, 0)
        await second.submit(0, 16)
        assert (await until(second, own, own)).slots == own
        await engine.client.resume()
        await asyncio.gather(*(run.samples(16) for run in (first, second)))


async def test_rollout_run_requests_is_the_most_of_each_run(tmp_path: Path) -> None:
    async with fleet(tmp_path, token_seconds=0.01, rollout_run_requests=3) as shared:
        first = shared.runs["first"]
        await first.publish(1)
        await first.submit(0)
        most = 0
        async with asyncio.timeout(60):
            while (await first.buffer.stats("train")).groups["READY"] < NUM_GROUPS:
                most = max(most, shared.engine.num_in_flight)
                await asyncio.sleep(0.001)
        assert most == 3
