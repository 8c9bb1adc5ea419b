"""Leaves of a job that shape its stream."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.job.schema.job import Job
from headrace.job.schema.production import DataSection, RolloutSection
from headrace.job.schema.run import ModelSection
from headrace.job.schema.services import BufferSection, ServicesSection
from services.buffer.build import of_shard, store_of_job, train_stream, user_code_of
from services.buffer.ledger.limiter import Limiter
from services.buffer.ledger.stream import Selection, StreamConfig
from services.buffer.store.base import Store
from services.buffer.store.memory import MemoryStore
from services.buffer.store.sqlite import SqliteStore


def job_of(**sections: object) -> Job:
    fields: dict[str, object] = {
        "model": ModelSection(hf_checkpoint=Path("/none")),
        "rollout": RolloutSection(rollout_batch_size=4, n_samples_per_prompt=2),
        **sections,
    }
    return Job(**fields)  # type: ignore[arg-type]


def stream_of(**sections: object) -> StreamConfig:
    return train_stream(job_of(**sections))


def test_files_with_weights_slices_and_workers() -> None:
    data = DataSection(
        prompt_data=("/a.jsonl", "/b.parquet@[2:9]"),
        prompt_data_weights=(3, 1),
        streaming_data=True,
        num_data_workers=3,
    )
    first, second = stream_of(data=data).files
    assert (first.path, first.weight, first.first_row, first.end_row) == ("/a.jsonl", 3.0, 0, None)
    assert (second.path, second.weight, second.first_row, second.end_row) == ("/b.parquet", 1.0, 2, 9)
    assert (second.streaming, second.num_workers) == (True, 3)


def test_shards_share_a_step() -> None:
    services = ServicesSection(buffer_address="a:1,b:1,c:1")
    shards = [stream_of(services=services, buffer=BufferSection(buffer_shard=k)) for k in range(3)]
    assert [(s.groups_per_step, s.shard, s.num_shards) for s in shards] == [(2, 0, 3), (1, 1, 3), (1, 2, 3)]
    with pytest.raises(ConfigError, match="one of 3 shards and was not told which: pass --buffer-shard"):
        stream_of(services=services)


def test_a_job_with_buffer_shards_starts_each_with_its_share_of_a_step_and_of_the_limits() -> None:
    limits = {"max_payload_bytes": 1001, "min_size_to_sample": 3}
    job = job_of(buffer=BufferSection(buffer_shards=2, **limits))
    first, second = (train_stream(of_shard(job, shard)) for shard in range(2))
    assert [(s.groups_per_step, s.shard, s.num_shards) for s in (first, second)] == [(2, 0, 2), (2, 1, 2)]
    assert (first.max_payload_bytes, first.max_groups, first.max_leases) == (501, 1_000_000, 50_000)
    assert [s.limiter and s.limiter.min_size for s in (first, second)] == [2, 1]
    with pytest.raises(ConfigError, match="one of 2 shards and was not told which"):
        train_stream(job)


def test_policies_of_the_buffer() -> None:
    config = stream_of(
        buffer=BufferSection(
            selection="surprise",
            max_payload_bytes=1 << 20,
            min_size_to_sample=6,
            samples_per_insert=0.5,
        ),
        rollout=RolloutSection(rollout_batch_size=4, n_samples_per_prompt=2, over_sampling_batch_size=6),
    )
    assert config.selection == Selection.SURPRISE
    assert (config.retain_steps, config.max_groups, config.max_leases) == (100, 2_000_000, 100_000)
    assert config.max_payload_bytes == 1 << 20
    assert config.limiter == Limiter(6, 0.5, 4.0)
    assert config.over_sampling_groups == 2


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [
        ("input_key", "question", "input_key"),
        ("label_key", "answer", "label_key"),
        ("metadata_key", "extra", "metadata_key"),
        ("tool_key", "tools", "tool_key"),
        ("priority_key", "urgent", "priority_key"),
        ("rollout_shuffle", True, "shuffle"),
        ("rollout_seed", 7, "seed"),
        ("num_epoch", 3, "num_epochs"),
        ("skip_bad_lines", True, "skip_bad_lines"),
    ],
)
def test_a_file_is_walked_as_the_job_says(flag: str, value: object, name: str) -> None:
    plain, told = (
        stream_of(data=DataSection.model_validate({"prompt_data": ("/a.jsonl",)} | more)).files[0]
        for more in ({}, {flag: value})
    )
    assert getattr(told, name) == value
    assert getattr(plain, name) != value


def test_user_code_chooses_the_batch_and_gives_the_prompts_within_its_time() -> None:
    buffer = BufferSection(buffer_filter_path="a.choose")
    config = stream_of(buffer=buffer, data=DataSection(data_source_path="a.Source"))
    assert (config.selection, config.data_source) == (Selection.HOOK, "a.Source")
    code = user_code_of(Job(model=ModelSection(hf_checkpoint=Path("/none")), buffer=buffer), Path("/ledger"))
    assert (code.buffer_filter_path, code.seconds) == ("a.choose", 60.0)


def test_staleness_is_the_jobs_and_a_lease_takes_a_minute_and_three_attempts() -> None:
    config = stream_of(buffer=BufferSection(max_staleness=4))
    assert (config.lease_seconds, config.max_attempts, config.max_staleness) == (60.0, 3, 4)


@pytest.mark.parametrize(("buffer_store", "kind"), [("memory", MemoryStore), ("sqlite", SqliteStore)])
def test_the_ledger_is_in_the_store_that_buffer_store_names(
    buffer_store: str, kind: type[Store], tmp_path: Path
) -> None:
    buffer = BufferSection.model_validate({"buffer_store": buffer_store})
    store = store_of_job(Job(model=ModelSection(hf_checkpoint=Path("/none")), buffer=buffer), tmp_path)
    assert isinstance(store, kind)
    store.close()
