"""The `train` stream of a job."""

from __future__ import annotations

from headrace.config.job import DataSection, Job
from headrace.errors import ConfigError
from services.buffer.stream import FileSource, StreamConfig

TRAIN_STREAM = "train"


def train_stream(job: Job) -> StreamConfig:
    """Raises ConfigError when no group could ever be fresh enough (see `admission`), or sizes are not resolved."""
    if job.rollout.rollout_batch_size is None or job.rollout.n_samples_per_prompt is None:
        raise ConfigError("rollout_batch_size and n_samples_per_prompt are absent: the buffer takes the resolved job")
    interval = job.publish.update_weights_interval
    if job.buffer.max_staleness < interval - 1:
        raise ConfigError(
            f"update_weights_interval {interval} serves weights up to {interval - 1} steps old, "
            f"max_staleness is {job.buffer.max_staleness}: set it to {interval - 1} or more, or publish more often"
        )
    return StreamConfig(
        name=TRAIN_STREAM,
        n_samples_per_prompt=job.rollout.n_samples_per_prompt,
        groups_per_step=job.rollout.rollout_batch_size,
        max_staleness=job.buffer.max_staleness,
        lease_seconds=job.buffer.lease_seconds,
        max_attempts=job.buffer.max_attempts,
        file=_file(job.data),
        max_payload_bytes=job.buffer.max_payload_bytes,
    )


def _file(data: DataSection) -> FileSource | None:
    if data.prompt_data is None:
        return None
    return FileSource(
        path=str(data.prompt_data),
        input_key=data.input_key,
        label_key=data.label_key,
        metadata_key=data.metadata_key,
        tool_key=data.tool_key,
        shuffle=data.rollout_shuffle,
        seed=data.rollout_seed,
        num_epochs=data.num_epoch,
        skip_bad_lines=data.skip_bad_lines,
    )
