"""Flags that run a part of a run alone, before a real buffer: the trainer trains nothing, or nobody generates."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.buffer import BufferClient
from headrace.job.schema.job import Job
from headrace.recorded_steps import RecordedSteps
from headrace.rpc.server import Listen
from services.buffer.store.memory import MemoryStore
from services.trainer.__main__ import run_rank0
from services.trainer.control.build import TrainerBuild
from services.trainer.data.samples import Fetch
from tests.support.ledgers.buffer_samples import complete_put, text_prompts
from tests.support.processes.buffer_server import served_buffer

NUM_STEPS = 3


class Untrained(TrainerBuild):
    """Its ranks only write down what they are given."""

    trains = False


async def run(build: TrainerBuild) -> None:
    """The work of rank 0."""
    buffer = build.buffer()
    fetch = Fetch(buffer, "train", asyncio.get_running_loop())
    with ThreadPoolExecutor(1) as compute:
        await run_rank0(build, Listen("127.0.0.1:0"), buffer, fetch, compute)
    await buffer.close()


def job_of(address: str, **debug: Any) -> Job:
    """No model is there, and no rollout service answers."""
    return Job.model_validate(
        {
            "model": {"hf_checkpoint": "nowhere"},
            "rollout": {"num_rollout": NUM_STEPS, "rollout_batch_size": 2, "n_samples_per_prompt": 2},
            "services": {"buffer_address": address, "rollout_address": "127.0.0.1:9"},
            "tracking": {"use_tensorboard": False},
            "debug": debug,
        }
    )


def trained(folder: Path) -> list[Any]:
    """What a run wrote down of each of its steps."""
    return [json.loads(line) for line in (folder / "trained.jsonl").read_text().splitlines()]


async def generated(client: BufferClient) -> None:
    """The groups of all steps are made."""
    await client.create_stream(
        pb.StreamConfig(name="train", n_samples_per_prompt=2, groups_per_step=2, max_staleness=5)
    )
    await client.submit_prompts("train", text_prompts(*(str(number) for number in range(2 * NUM_STEPS))))
    leases = (await client.lease_groups("train", "test", 2 * NUM_STEPS)).leases
    await client.put_groups([complete_put(lease) for lease in leases])


async def test_a_run_with_debug_rollout_only_keeps_its_steps_and_another_trains_on_what_was_kept(
    tmp_path: Path,
) -> None:
    kept = str(tmp_path / "steps" / "{rollout_id}.samples")
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await generated(client)
        build = TrainerBuild(
            job_of(server.address, debug_rollout_only=True, save_debug_rollout_data=kept), tmp_path / "first"
        )
        await run(build)
        assert (await client.stats("train")).committed_step == NUM_STEPS
    steps = RecordedSteps(kept)
    assert steps.steps() == list(range(NUM_STEPS))
    first = trained(tmp_path / "first")
    of_files = [[sample.envelope.sample_id for sample in steps.read(number).samples] for number in steps.steps()]
    assert [sorted(ids) for ids in of_files] == [sorted(row["sample_ids"]) for row in first]
    again = Untrained(job_of(server.address, load_debug_rollout_data=kept), tmp_path / "second")
    assert again.rollout() is None
    await run(again)
    assert trained(tmp_path / "second") == first
