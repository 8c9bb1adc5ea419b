from __future__ import annotations

import pytest

from headrace.api.rollout.v1 import rollout_pb2 as pb
from headrace.errors import InvalidArgument
from services.rollout.publication.checksums import differences, digest
from services.rollout.wire import plan_of


def begin(**changes: object) -> pb.BeginPublishRequest:
    request = pb.BeginPublishRequest(
        publication_id="p",
        policy_version=1,
        backend="gloo",
        deadline_seconds=5,
        manifest=pb.Manifest(tensors=[pb.TensorSpec(name="a", shape=[2], dtype="float32", bucket=0)]),
        groups=[pb.PublishGroup(name="g", master_address="127.0.0.1", master_port=1, buckets=[0])],
    )
    request.MergeFrom(pb.BeginPublishRequest(**changes))  # type: ignore[arg-type]
    return request


def test_a_request_becomes_a_plan_with_defaults() -> None:
    plan = plan_of(begin())
    assert (plan.pause_mode, plan.deadline_seconds, list(plan.buckets)) == ("in_place", 5.0, [0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transport": pb.TRANSPORT_DISK}, "TRANSPORT_DISK is not built yet"),
        ({"backend": "mpi"}, "backend 'mpi' is not one of gloo, nccl"),
        ({"deadline_seconds": -1.0}, "deadline_seconds is -1, must be above 0"),
        ({"manifest": pb.Manifest(tensors=[pb.TensorSpec(name="b", bucket=3)])}, r"the manifest has \[0, 3\]"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        plan_of(begin(**changes))


def test_checksums_differ_by_value_by_absence_but_not_by_a_tied_head() -> None:
    rank = {"a": "1", "b": "2"}
    assert differences({"a": "1", "b": "2", "lm_head.weight": "1"}, [rank]) is None
    assert differences({"a": "1"}, [rank]) is None
    assert "first b: sent 3, engine has 2" in (differences({"b": "3"}, [rank]) or "")
    assert "the sender says nothing about a" in (differences({"b": "3"}, [rank]) or "")
    assert "the engine has no c" in (differences({"c": "1"}, [rank]) or "")
    assert digest([rank]) != digest([{**rank, "a": "2"}])
