"""StreamConfig: proto to the domain and back."""

from __future__ import annotations

from headrace.api.buffer.v1 import buffer_pb2 as pb
from headrace.errors import InvalidArgument
from services.buffer.stream import (
    DEFAULT_LEASE_SECONDS,
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_MAX_PAYLOAD_BYTES,
    DEFAULT_MAX_QUEUED_GROUPS,
    ExpiryAction,
    FileSource,
    Selection,
    StreamConfig,
)
from services.buffer.wire_checks import require

_SELECTIONS = {
    pb.SELECTION_UNSPECIFIED: Selection.FIFO,
    pb.SELECTION_FIFO: Selection.FIFO,
    pb.SELECTION_LIFO: Selection.LIFO,
    pb.SELECTION_PRIORITY: Selection.PRIORITY,
    pb.SELECTION_FRESHEST: Selection.FRESHEST,
}
_EXPIRY_ACTIONS = {
    pb.EXPIRY_ACTION_UNSPECIFIED: ExpiryAction.REQUEUE,
    pb.EXPIRY_ACTION_REQUEUE: ExpiryAction.REQUEUE,
    pb.EXPIRY_ACTION_DROP: ExpiryAction.DROP,
}


def to_config(message: pb.StreamConfig) -> StreamConfig:
    """Defaults filled in."""
    if message.selection not in _SELECTIONS:
        raise InvalidArgument(f"selection {message.selection} is not known here", field="config.selection")
    if message.expiry_action not in _EXPIRY_ACTIONS:
        raise InvalidArgument(f"expiry_action {message.expiry_action} is not known here", field="config.expiry_action")
    return StreamConfig(
        name=message.name,
        n_samples_per_prompt=message.n_samples_per_prompt,
        groups_per_step=message.groups_per_step,
        max_staleness=message.max_staleness if message.HasField("max_staleness") else None,
        lease_seconds=message.lease_seconds or DEFAULT_LEASE_SECONDS,
        max_attempts=message.max_attempts or DEFAULT_MAX_ATTEMPTS,
        expiry_action=_EXPIRY_ACTIONS[message.expiry_action],
        selection=_SELECTIONS[message.selection],
        file=_to_file(message.file) if message.HasField("file") else None,
        max_payload_bytes=message.max_payload_bytes or DEFAULT_MAX_PAYLOAD_BYTES,
        max_queued_groups=message.max_queued_groups or DEFAULT_MAX_QUEUED_GROUPS,
    )


def _to_file(message: pb.FileSource) -> FileSource:
    return FileSource(
        path=require(message.path, "config.file.path"),
        input_key=require(message.input_key, "config.file.input_key"),
        label_key=message.label_key or None,
        metadata_key=message.metadata_key or None,
        tool_key=message.tool_key or None,
        shuffle=message.shuffle,
        seed=message.seed,
        num_epochs=message.num_epochs or None,
        skip_bad_lines=message.skip_bad_lines,
    )


def from_config(config: StreamConfig) -> pb.StreamConfig:
    """The inverse of `to_config`."""
    file = config.file
    return pb.StreamConfig(
        name=config.name,
        n_samples_per_prompt=config.n_samples_per_prompt,
        groups_per_step=config.groups_per_step,
        max_staleness=config.max_staleness,
        lease_seconds=config.lease_seconds,
        max_attempts=config.max_attempts,
        expiry_action=pb.ExpiryAction.Value(f"EXPIRY_ACTION_{config.expiry_action.name}"),
        selection=pb.Selection.Value(f"SELECTION_{config.selection.name}"),
        file=None if file is None else _from_file(file),
        max_payload_bytes=config.max_payload_bytes,
        max_queued_groups=config.max_queued_groups,
    )


def _from_file(file: FileSource) -> pb.FileSource:
    return pb.FileSource(
        path=file.path,
        input_key=file.input_key,
        label_key=file.label_key or "",
        metadata_key=file.metadata_key or "",
        tool_key=file.tool_key or "",
        shuffle=file.shuffle,
        seed=file.seed,
        num_epochs=file.num_epochs or 0,
        skip_bad_lines=file.skip_bad_lines,
    )
