"""What a data source sets on its samples reaches functions: paths of functions, labels that are objects, images."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from headrace.api.buffer.v1 import buffer_pb2
from headrace.cli.commands.ledger import prompt_of
from headrace.client.buffer import BufferClient
from headrace.client.reward import RewardClient
from headrace.errors import InvalidArgument
from headrace.hooks import HookArgs, hook_args, to_hook
from headrace.job.schema.job import Job
from headrace.job.schema.services import RewardSection
from headrace.rpc.server import Listen
from headrace.score import Score, ScoreError, ScoreItem
from headrace.trajectory import Sample as WireSample
from services.buffer.build import train_stream, user_code_of
from services.buffer.store.memory import MemoryStore
from services.reward.server import RewardServer
from services.rollout.build import rollout_service
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.fake_fleet import WIRE, without_router
from tests.support.ledgers.buffer_samples import text_prompts
from tests.support.models.chat_templates import make_chat_tokenizer
from tests.support.models.tiny_model import make_tiny_qwen3
from tests.support.processes.buffer_server import served_buffer

CODE = """
from headrace.hooks import RolloutDataSource, Sample

LABELS = [
    {"ground_truth": ["seven", "VII"], "style": {"rule": 1}}, [3, {"or": "three"}], "{\\"text\\": 1}", "plain", 12
]

class Source(RolloutDataSource):
    def get_samples(self, num_samples):
        return [Sample(
            prompt=f"prompt {number}",
            label=LABELS[number % len(LABELS)],
            session_id=f"chat {number}" if number % 2 else None,
            generate_function_path=f"{__file__}:shouts" if number % 3 == 1 else None,
            custom_rm_path=f"{__file__}:by_type" if number % 3 == 2 else None,
        ) for number in range(num_samples)]

def finish(sample, text):
    sample.tokens, sample.response, sample.response_length = [1, 2, 3, 4], text, 2
    sample.rollout_log_probs, sample.weight_versions = [-0.5, -0.25], ["0"]
    sample.status = Sample.Status.COMPLETED
    return sample

async def shouts(args, sample, sampling_params):
    sample.metadata["session"] = sample.session_id
    return finish(sample, "SHOUT")

async def by_type(args, sample):
    return {"object": 10.0, "list": 20.0}.get("object" if isinstance(sample.label, dict) else
        "list" if isinstance(sample.label, list) else "", 30.0)

async def of_job(args, sample):
    sample.metadata["label"] = sample.label
    return 1.0
"""


@contextlib.asynccontextmanager
async def producing(folder: Path) -> AsyncIterator[BufferClient]:
    """A ledger with the data source, a reward service and a producer."""
    make_tiny_qwen3(folder)
    make_chat_tokenizer("qwen3").save_pretrained(folder)
    (folder / "own.py").write_text(CODE)
    sections: dict[str, Any] = {
        "model": {"hf_checkpoint": folder},
        "data": {"data_source_path": f"{folder / 'own.py'}:Source"},
        "reward": {"custom_rm_path": f"{folder / 'own.py'}:of_job", "reward_workers": 1},
        "rollout": {"rollout_batch_size": 6, "n_samples_per_prompt": 1, "rollout_max_response_len": 4},
    }
    job = Job.model_validate(sections)
    reward = await RewardServer.start(job.reward, hook_args(job), Listen("127.0.0.1:0"))
    try:
        async with (
            served_buffer(MemoryStore(), user_code=user_code_of(job, folder)) as (buffer, server),
            BufferClient(server.address) as client,
        ):
            await buffer.create_stream(train_stream(job))
            services = {"buffer_address": server.address, "reward_address": reward.rpc.address}
            job = Job.model_validate({**sections, "services": services})
            engine = FakeEngine(WIRE)
            with without_router(engine):
                service = rollout_service(job, lambda number: engine, folder, CollectorRegistry())
            await service.start()
            try:
                yield client
            finally:
                await service.stop()
    finally:
        await reward.stop(0.0)


async def test_paths_sessions_and_labels_of_a_data_source_act_and_survive(tmp_path: Path) -> None:
    async with asyncio.timeout(240), producing(tmp_path) as client:
        while (await client.stats("train")).groups["READY"] < 6:
            await asyncio.sleep(0.05)
        groups = (await client.list_groups("train")).groups
        ids = [sample.sample_id for group in groups for sample in group.samples]
        found = [WireSample.unpack(each) for each in await client.fetch_samples("train", ids)]
    samples = {sample.prompt: (sample, to_hook(sample)) for sample in found}
    own = str(tmp_path / "own.py")
    for number, label in enumerate(
        [{"ground_truth": ["seven", "VII"], "style": {"rule": 1}}, [3, {"or": "three"}], '{"text": 1}', "plain", "12"]
    ):
        sample, seen = samples[f"prompt {number}"]
        assert seen.label == label, f"prompt {number}"
        assert seen.generate_function_path == (f"{own}:shouts" if number % 3 == 1 else None)
        assert seen.custom_rm_path == (f"{own}:by_type" if number % 3 == 2 else None)
        assert (sample.response == "SHOUT") == (number % 3 == 1)
        assert sample.reward == (30.0 if number % 3 == 2 else 1.0)
        if number % 3 != 2:
            assert sample.metadata["label"] == label
    assert samples["prompt 1"][0].metadata["session"] == "chat 1"
    assert samples["prompt 5"][0].reward == 10.0, "the sixth label is the first again, and its own function scores it"


async def test_a_samples_own_reward_is_given_its_label_as_submitted_and_one_that_cannot_be_loaded_fails_alone(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(
        "def f(args, sample):\n    return {dict: 3.0, list: 2.0, str: 1.0}[type(sample.label)]\n"
    )
    server = await RewardServer.start(RewardSection(rm_type="math"), HookArgs({}), Listen("127.0.0.1:0"))
    labels = ({"answers": {"a": [1]}}, [["x"], None, 2.5], '{"answers": 1}', "7", True)
    asked = [*((label, f"{tmp_path / 'own.py'}:f") for label in labels), ("7", f"{tmp_path / 'own.py'}:three")]
    items = []
    for number, (label, path) in enumerate(asked):
        prompt = prompt_of({"prompt": "p", "label": label}, "p", chat=False)
        fields = json.loads(prompt.hook_json or "{}") | {"custom_rm_path": path}
        items.append(ScoreItem(str(number), "p", "7", prompt.label, hook_fields=fields))
    try:
        async with RewardClient(server.rpc.address) as client:
            *scores, three, of_job = await client.score(
                [*items, ScoreItem("job", "p", "7", "7")], deadline_seconds=60.0
            )
    finally:
        await server.stop(0.0)
    assert [score.value for score in (*scores, of_job) if isinstance(score, Score)] == [3.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    assert isinstance(three, ScoreError)
    assert "has no 'three'" in three.message


async def test_a_client_may_not_name_functions_to_run() -> None:
    async with served_buffer(MemoryStore()) as (_, server), BufferClient(server.address) as client:
        await client.create_stream(buffer_pb2.StreamConfig(name="train", n_samples_per_prompt=1, groups_per_step=1))
        for fields in ({"custom_rm_path": "os.f"}, {"generate_function_path": "os.f"}, {"session_id": "x"}):
            (prompt,) = text_prompts("p")
            prompt.hook_json = json.dumps(fields)
            with pytest.raises(InvalidArgument, match="only the job's own data source may set them"):
                await client.submit_prompts("train", [prompt])
        (prompt,) = text_prompts("p")
        prompt.hook_json = '{"label_is_json":true}'
        await client.submit_prompts("train", [prompt])
