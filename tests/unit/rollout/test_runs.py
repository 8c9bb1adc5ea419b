"""Several runs on one rollout service and fake engines: each is served its adapters and fills its own ledger."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2
from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.api.sample.v1 import sample_pb2
from headrace.client.buffer import BufferClient
from headrace.client.rollout import RolloutClient
from headrace.job.schema.job import Job
from headrace.models.folders import base_digest
from headrace.run_folder import RunFolder
from services.buffer.store.memory import MemoryStore
from services.rollout import runs
from services.rollout.build import rollout_service
from services.rollout.server import RolloutServicer, WaitUntilStarted
from services.rollout.service import RolloutService
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

    async def samples(self, count: int = NUM_GROUPS) -> list[buffer_pb2.GroupInfo]:
        """The groups that are ready, once they are so many."""
        async with asyncio.timeout(60):
            while (await self.buffer.stats("train")).groups["READY"] < count:
                await asyncio.sleep(0.01)
        return [group for group in (await self.buffer.list_groups("train")).groups if group.samples]


@dataclass
class Fleet:
    engine: FakeEngine
    service: RolloutService
    registry: CollectorRegistry
    address: str
    runs: Mapping[str, Run] = field(default_factory=dict)

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
        jobs, buffers = {}, {}
        for number, name in enumerate(("first", "second", "third")):
            _, server = await stack.enter_async_context(served_buffer(MemoryStore()))
            buffers[name] = await stack.enter_async_context(BufferClient(server.address))
            reward = await stack.enter_async_context(scripted_reward(score(float(number))))
            jobs[name] = Job.model_validate(sections(name, server.address, reward.address))
            config = buffer_pb2.StreamConfig(
                name="train", n_samples_per_prompt=NUM_SAMPLES, groups_per_step=NUM_GROUPS, max_staleness=8
            )
            await buffers[name].create_stream(config)
        engine, registry = FakeEngine(WIRE, token_seconds=token_seconds), CollectorRegistry()
        with without_router(engine):
            service = rollout_service(jobs["first"], lambda _: engine, folder, registry)
        await service.start()
        stack.push_async_callback(service.stop)
        servicer: Any = WaitUntilStarted(RolloutServicer(service.parts), service.started)
        address = await stack.enter_async_context(served_rollout(servicer))
        found = {
            name: Run(job, buffers[name], await stack.enter_async_context(RolloutClient(address, run=name)))
            for name, job in jobs.items()
        }
        yield Fleet(engine, service, registry, address, found)


def versions(groups: list[buffer_pb2.GroupInfo]) -> set[int]:
    return {r.policy_version for group in groups for sample in group.samples for r in sample.policy_ranges}


async def test_each_run_is_served_its_own_versions_and_fills_its_own_ledger(tmp_path: Path) -> None:
    async with fleet(tmp_path) as shared:
        first, second = shared.runs["first"], shared.runs["second"]
        assert await first.join() == 0, "it is its own service"
        assert await second.join() == runs.LEASE_SECONDS
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
