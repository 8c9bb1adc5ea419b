"""A stream that a client creates over shards is divided as the job's own is."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.client.shards import merged_config, share_of
from headrace.job.schema.job import Job
from headrace.job.schema.production import RolloutSection
from headrace.job.schema.run import ModelSection
from headrace.job.schema.services import BufferSection
from services.buffer.build import of_shard, train_stream
from services.buffer.wire import config_to_proto

NUM_SHARDS = 3
PER_GROUP = {"n_samples_per_prompt", "max_staleness", "lease_seconds", "max_attempts", "retain_steps", "vocab_size"}
"""They hold for a group wherever it is."""
OF_THE_SHARD = {"shard", "num_shards"}
_NUMBERS = {FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64, FieldDescriptor.CPPTYPE_DOUBLE}


def numbers() -> list[str]:
    """Names of the stream's numbers, those of later versions too."""
    return [field.name for field in pb.StreamConfig.DESCRIPTOR.fields if field.cpp_type in _NUMBERS]


def test_every_number_of_a_stream_is_divided_or_holds_for_each_group() -> None:
    names = [name for name in numbers() if name not in OF_THE_SHARD]
    whole = pb.StreamConfig(name="train")
    for name in names:
        setattr(whole, name, 31)
    shares = [share_of(whole, shard, NUM_SHARDS) for shard in range(NUM_SHARDS)]
    same = {name for name in names if all(getattr(share, name) == 31 for share in shares)}
    assert same == PER_GROUP
    for name in set(names) - PER_GROUP:
        divided = [getattr(share, name) for share in shares]
        assert divided in ([11, 10, 10], [11, 11, 11]), name
        assert getattr(merged_config(shares), name) == sum(divided)


@pytest.mark.parametrize("groups", [4, 5, 8])
def test_a_client_divides_a_stream_as_the_jobs_own_shards_do(groups: int) -> None:
    def stream(num_shards: int, shard: int) -> pb.StreamConfig:
        section = BufferSection(
            buffer_shards=num_shards,
            max_payload_bytes=1 << 20,
            min_size_to_sample=2,
            samples_per_insert=0.5,
        )
        rollout = RolloutSection(rollout_batch_size=groups, n_samples_per_prompt=2, over_sampling_batch_size=groups + 4)
        job = Job(model=ModelSection(hf_checkpoint=Path("/none")), rollout=rollout, buffer=section)
        config = config_to_proto(train_stream(of_shard(job, shard)))
        config.ClearField("max_queued_groups")  # not the job's: a buffer's default
        return config

    shares = [share_of(stream(1, 0), shard, NUM_SHARDS) for shard in range(NUM_SHARDS)]
    assert shares == [stream(NUM_SHARDS, shard) for shard in range(NUM_SHARDS)]
    assert [share.limiter.min_size_to_sample for share in shares] == [1, 1, 1]
