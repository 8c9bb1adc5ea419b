"""A BeginPublish request becomes a plan; every field is checked before anything begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import InvalidArgument
from headrace.limits import (
    LAST_PORT,
    MAX_BUCKETS,
    MAX_COLUMN_BYTES,
    MAX_COLUMN_RANK,
    MAX_DELTAS,
    MAX_ENGINES,
    MAX_PUBLISH_GROUPS,
    MAX_PUBLISH_SECONDS,
    MAX_TENSORS,
    require_at_most,
    require_between,
    require_counter,
    require_finite,
    require_id,
    require_name,
    require_path,
    shown,
)
from headrace.publication import ITEM_BYTES, TensorSpec
from services.rollout.publication.state import Delta, GroupPlan, Plan

_PAUSE_MODES: Mapping[int, str] = {
    pb.PAUSE_MODE_UNSPECIFIED: "in_place",
    pb.PAUSE_MODE_IN_PLACE: "in_place",
    pb.PAUSE_MODE_RETRACT: "retract",
    pb.PAUSE_MODE_ABORT: "abort",
}
_TRANSPORTS = tuple(pb.Transport.values())
_THROUGH_FILES = (pb.TRANSPORT_DISK, pb.TRANSPORT_IPC, pb.TRANSPORT_ADAPTER)
_BACKENDS = ("gloo", "nccl")


def plan_from_proto(request: pb.BeginPublishRequest) -> Plan:
    """Raises InvalidArgument for a request that is not supported or contradicts itself."""
    if request.transport not in _TRANSPORTS:
        raise InvalidArgument(
            f"transport {request.transport} is not one of {', '.join(pb.Transport.keys())}", field="transport"
        )
    if request.backend not in _BACKENDS:
        raise InvalidArgument(f"backend {shown(request.backend)} is not one of {', '.join(_BACKENDS)}", field="backend")
    if request.pause_mode not in _PAUSE_MODES:
        raise InvalidArgument(f"pause_mode {request.pause_mode} is not known", field="pause_mode")
    folder = _folder(request)
    is_broadcast_whole = folder is None and not request.HasField("delta")
    require_counter(request.manifest.total_bytes, "manifest.total_bytes")
    require_at_most(len(request.engine_ids), MAX_ENGINES, "engine_ids")
    return Plan(
        publication_id=require_id(request.publication_id, "publication_id"),
        epoch=require_counter(request.epoch, "epoch"),
        policy_version=require_counter(request.policy_version, "policy_version"),
        pause_mode=_PAUSE_MODES[request.pause_mode],
        backend=request.backend,
        deadline_seconds=require_finite(request.deadline_seconds, "deadline_seconds", most=MAX_PUBLISH_SECONDS),
        buckets=_buckets(request.manifest.tensors, MAX_COLUMN_BYTES if is_broadcast_whole else None),
        groups=_groups(request.groups),
        engine_ids=_distinct([require_name(i, "engine_ids") for i in request.engine_ids], "engine_ids"),
        folder=folder,
        is_loaded=request.transport == pb.TRANSPORT_LOADED,
        is_adapter=request.transport == pb.TRANSPORT_ADAPTER,
        delta=_delta(request.delta) if request.HasField("delta") else None,
    )


def _delta(delta: pb.Delta) -> Delta:
    require_at_most(len(delta.bucket_bytes), MAX_BUCKETS, "delta.bucket_bytes")
    require_at_most(len(delta.base_paths), MAX_DELTAS, "delta.base_paths")
    return Delta(
        base_digest=require_name(delta.base_digest, "delta.base_digest") if delta.base_digest else "",
        bucket_bytes=[require_between(n, 1, MAX_COLUMN_BYTES, "delta.bucket_bytes") for n in delta.bucket_bytes],
        base_folders=[_absolute(path, "delta.base_paths") for path in delta.base_paths],
    )


def _folder(request: pb.BeginPublishRequest) -> Path | None:
    if request.transport not in _THROUGH_FILES:
        if request.disk_path:
            named = ", ".join(map(pb.Transport.Name, _THROUGH_FILES))
            raise InvalidArgument(f"disk_path is for {named} only", field="disk_path")
        return None
    return _absolute(request.disk_path, "disk_path")


def _absolute(path: str, field: str) -> Path:
    folder = Path(require_path(path, field))
    if not folder.is_absolute():
        raise InvalidArgument(f"{field} {shown(path)} is not absolute", field=field)
    return folder


def _buckets(tensors: Sequence[pb.TensorSpec], most_bytes: int | None) -> dict[int, list[TensorSpec]]:
    """`most_bytes` of a bucket are what one broadcast may hold; None: nothing is broadcast."""
    field = "manifest.tensors"
    require_at_most(len(tensors), MAX_TENSORS, field)
    _distinct([require_id(tensor.name, f"{field}.name") for tensor in tensors], f"{field}.name")
    buckets: dict[int, list[TensorSpec]] = {}
    latest = sent_bytes = 0
    for tensor in tensors:
        require_between(tensor.bucket, 0, MAX_BUCKETS, f"{field}.bucket")
        if tensor.bucket < latest:
            raise InvalidArgument(f"{tensor.name}: bucket {tensor.bucket} after {latest}", field=field)
        sent_bytes = _bytes_of(tensor) + (sent_bytes if tensor.bucket == latest else 0)
        if most_bytes is not None and sent_bytes > most_bytes:
            raise InvalidArgument(f"bucket {tensor.bucket} has more than {most_bytes} bytes", field=field)
        latest = tensor.bucket
        buckets.setdefault(latest, []).append(TensorSpec(tensor.name, tuple(tensor.shape), tensor.dtype))
    return buckets


def _bytes_of(tensor: pb.TensorSpec) -> int:
    if tensor.dtype not in ITEM_BYTES:
        raise InvalidArgument(
            f"{tensor.name}: dtype {shown(tensor.dtype)} is not one of {', '.join(ITEM_BYTES)}",
            field="manifest.tensors.dtype",
        )
    shape = tuple(tensor.shape[: MAX_COLUMN_RANK + 1])
    if len(shape) > MAX_COLUMN_RANK or any(n < 1 for n in shape) or prod(shape) > MAX_COLUMN_BYTES:
        raise InvalidArgument(
            f"{tensor.name}: shape {list(shape)} has more than {MAX_COLUMN_RANK} dimensions, one below 1, or too many "
            "elements",
            field="manifest.tensors.shape",
        )
    return prod(shape) * ITEM_BYTES[tensor.dtype]


def _groups(groups: Sequence[pb.PublishGroup]) -> list[GroupPlan]:
    require_at_most(len(groups), MAX_PUBLISH_GROUPS, "groups")
    _distinct([require_id(group.name, "groups.name") for group in groups], "groups.name")
    plans: list[GroupPlan] = []
    for group in groups:
        require_at_most(len(group.buckets), MAX_BUCKETS, "groups.buckets")
        host = require_name(group.master_address, "groups.master_address")
        port = require_between(group.master_port, 1, LAST_PORT, "groups.master_port")
        plans.append(GroupPlan(group.name, host, port, tuple(group.buckets), group.joined))
    return plans


def _distinct(names: Sequence[str], field: str) -> tuple[str, ...]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidArgument(f"{field} has {shown(name)} twice", field=field)
        seen.add(name)
    return tuple(names)
